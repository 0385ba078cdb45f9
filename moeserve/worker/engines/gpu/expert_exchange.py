"""The expert cache: between two steps, what the last one used decides which experts come to the GPU.

    before_step     what has arrived enters the host's maps; the last step's misses choose what comes next, whose slots
                    leave the maps
    (the step is launched)
    after_launch    the copies, beside the step; and the step's counts of tokens to the host

The next step may be launched while one is computed. As long as promotions come, `before_step` then waits for its end:
a miss that is known a step later comes a step later. The GPU has nothing to do until the step is launched, so that what
can wait for that is behind it. While nothing pays nothing is waited for, and the policy hears of a step one later.

The policy is `moeserve.placement.expert_cache`'s, the copies are `models/loading/expert_slots.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, int64, zeros

from moeserve.kernels import _C
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.models.loading.expert_maps import ExpertMaps
from moeserve.models.loading.expert_slots import ExpertSlots
from moeserve.models.loading.promotion_tables import Batch
from moeserve.placement.expert_cache.policy import DECAY, PAYS, Mask

QUIET = 8  # choices without a promotion, from which on the step under way is not waited for

Ids = npt.NDArray[np.int64]


class Policy(Protocol):
    """`_C.ExpertCachePolicy`."""

    def observe(self, counts: Ids, *, streamed: bool) -> int:
        """A step ended. counts: int64 [layers, experts], tokens of each expert since the start. streamed: it brought
        experts itself, and what it used most of each layer stands for what it used. Returns how many it used."""

    def choose(self, most: int, *, pays: bool) -> Ids:
        """Chooses the next exchanges, int64 [moves, 3], by layer: the layer, the expert that comes, the expert that
        goes. They count as done. pays: only exchanges that are expected to pay."""

    def learn(self) -> None:
        """Learns from the last step which exchanges, made or not, would have paid. Called after `choose`, if there was
        one, when there is time."""

    def forget(self) -> None:
        """Counts begin at 0 again."""


class ExpertCache:
    """Owns the maps' changes and the slots' contents."""

    def __init__(
        self,
        maps: ExpertMaps,
        slots: ExpertSlots,
        movable: Mask,
        expert_token_counts: Tensor,
        pool_reads: Callable[[Mask], int],
    ) -> None:
        """movable: [layers, experts], the experts that may come and go, all of which lie in RAM. expert_token_counts:
        int64 [layers, experts] on the device, written by the steps. pool_reads: how many experts the pool has read
        since the start, of these layers."""
        self._maps, self._slots = maps, slots
        self._on_device = expert_token_counts
        is_gpu = expert_token_counts.device.type == "cuda"
        self._copied = zeros(expert_token_counts.shape, dtype=int64, pin_memory=is_gpu)
        self._counts: Ids = self._copied.numpy()
        self._cached_layers: Mask = np.any(movable, axis=1)
        self._pool_reads, self._reads = pool_reads, 0  # up to the step before
        self._bytes_of = np.array([slots.bytes_of(layer) for layer in range(len(movable))])
        self.policy: Policy = _C.ExpertCachePolicy(maps.on_gpu, movable, DECAY, PAYS)
        self._streams = False  # the step under way brings experts itself
        self._ran = False
        self._has_news = False  # what the policy has not learnt from yet
        self._coming: Batch | None = None
        self._without_moves = 0  # choices, up to the last
        self._hits = self._misses = self._promotions = self._bytes = 0
        self._taken = self.totals

    def before_step(self, *, streams: bool, until_ended: Callable[[], None] = lambda: None) -> None:
        """Launches the maps' changes. streams: the step brings experts in RAM to the GPU by itself: then every slot
        holds an expert during it, and nothing else is copied. until_ended: waits for the step under way, if there is
        one."""
        if streams or self._without_moves < QUIET:
            until_ended()
        changed = self._land(wait=streams)
        if self._ran:
            self._observe()
            if not streams and not self._slots.is_filling:
                # A prompt leaves its hottest behind at once; text brings what it misses as long as that pays.
                changed |= self._start(self.policy.choose(self._slots.most, pays=not self._streams))
        if changed:
            self._maps.publish()
        self._slots.free()
        self._streams, self._ran = streams, True

    def after_launch(self) -> None:
        """Launches the copies, and the counts' to the host, which has them when the step has ended."""
        if self._coming is not None and not self._slots.is_filling:
            self._slots.fill(self._coming)
        self._copied.copy_(self._on_device, non_blocking=True)
        if self._has_news:
            self.policy.learn()
            self._has_news = False

    def compile(self) -> None:
        """Within `compile_ahead`: every kernel that the copies need."""
        self._slots.compile()

    def capture(self) -> None:
        """Behind `compile_ahead`, before the first step."""
        self._slots.capture()

    def forget_counts(self) -> None:
        """The tokens counted so far were dummies, and the device's counts are zeros again."""
        self.policy.forget()
        self._reads = self._pool_reads(self._cached_layers)
        self._ran = False

    @property
    def totals(self) -> ExpertCacheCounts:
        """Since the start."""
        return ExpertCacheCounts(self._hits, self._misses, self._promotions, self._bytes)

    def take_counts(self) -> ExpertCacheCounts:
        """Since the last call."""
        before, self._taken = self._taken, self.totals
        return self._taken.since(before)

    def _land(self, *, wait: bool) -> bool:
        """Enters the experts that have arrived in the host's maps."""
        if not self._slots.is_filling or not self._slots.filled(wait=wait):
            return False
        assert self._coming is not None
        self._maps.land(self._coming)
        self._coming = None
        return True

    def _observe(self) -> None:
        """Notes the experts that the last step used. Misses are told by the pool, because experts arrive while a step
        runs."""
        used = self.policy.observe(self._counts, streamed=self._streams)
        reads = self._pool_reads(self._cached_layers)
        misses, self._reads = reads - self._reads, reads
        if not self._streams:
            self._has_news = True
            self._misses += misses
            self._hits += max(0, used - misses)

    def _start(self, moves: Ids) -> bool:
        """The slots leave the maps."""
        if not len(moves):
            self._without_moves += 1
            return False
        self._without_moves = 0
        self._coming = self._maps.start(moves)
        self._bytes += int(self._bytes_of[moves[:, 0]].sum())
        self._promotions += len(moves)
        return True
