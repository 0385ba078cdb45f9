"""The expert cache: between two steps, the last step's use of experts decides which experts are copied to the GPU.

    before_step     experts that have arrived enter the host's maps; the last step's misses choose the next exchanges,
                    whose slots leave the maps
    (the step is launched)
    after_launch    launches the copies beside the step, and the download of the step's token counts

The next step may be launched while one is computed. While promotions are being made, `before_step` waits for the
running step's end, because using its misses a step late would promote a step late. The GPU idles until the next
launch, so all work that can wait comes after it. While no promotion pays, nothing is waited for, and the policy
learns one step late.

Steps of several rows exchange experts themselves (`models/loading/expert_fetch.py`): nothing is promoted beside them,
and they are launched ahead. The device's map is then newer than the host's, which takes it over before the next step
that does not fetch.

The policy is in `moeserve.placement.expert_cache`, the copies in `models/loading/expert_slots.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor, float32, int32, int64, zeros

from moeserve.kernels import _C
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.models.loading.expert_fetch import ExpertFetch
from moeserve.models.loading.expert_maps import ExpertMaps
from moeserve.models.loading.expert_slots import ExpertSlots
from moeserve.models.loading.promotion_tables import Batch
from moeserve.placement.expert_cache.policy import DECAY, PAYS, Mask
from moeserve.worker.engines.gpu.disk_promotions import DiskPromotions

QUIET = 8  # consecutive choices without a promotion after which the running step is no longer waited for

Ids = npt.NDArray[np.int64]


class Policy(Protocol):
    """The interface of `_C.ExpertCachePolicy`, which chooses the experts to exchange."""

    def observe(self, counts: Ids, *, streamed: bool) -> int:
        """Takes the end of a step. counts: int64 [layers, experts], tokens per expert since start-up. streamed: the
        step streamed experts; then the most used ones of each layer count as used. Returns the number of experts
        used."""

    def choose(self, most: int, *, pays: bool, ready: Mask | None = None) -> Ids:
        """Returns the next exchanges, at most `most`: int64 [moves, 3], ascending by layer, each with its layer,
        incoming expert and outgoing expert. They count as made. pays: only exchanges that are expected to pay. ready:
        bool [layers, experts]: the experts that can be promoted now; None: all."""

    def adopt(self, cached: Mask) -> None:
        """Takes over exchanges made by steps. cached: bool [layers, experts]: the experts in slots now."""

    def learn(self) -> None:
        """Learns from the last step which exchanges, made or not, would have paid. Call it after `choose`, when
        there is time."""

    def scores(self) -> npt.NDArray[np.float32]:
        """Returns the experts' scores, [layers, experts]: recency with some frequency. A copy."""

    def forget(self) -> None:
        """Forgets all use of experts so far; the counts restart at 0."""


class ExpertCache:
    """Owns changes of the expert maps, and the contents of the GPU slots."""

    def __init__(
        self,
        maps: ExpertMaps,
        slots: ExpertSlots,
        movable: Mask,
        expert_token_counts: Tensor,
        pool_reads: Callable[[Mask], int],
        disk: DiskPromotions | None = None,
        fetch: ExpertFetch | None = None,
    ) -> None:
        """movable: bool [layers, experts]: experts that may be promoted or replaced; all are in RAM, or with `disk` on
        disk.
        expert_token_counts: int64 [layers, experts] on the device, written by the steps. pool_reads: returns how
        many of these layers' experts the pool has read since start-up. fetch: what steps of several rows fetch with;
        None: no step fetches."""
        self._maps, self._slots = maps, slots
        self._on_device = expert_token_counts
        is_gpu = expert_token_counts.device.type == "cuda"
        self._copied = zeros(expert_token_counts.shape, dtype=int64, pin_memory=is_gpu)
        self._fetch = fetch
        self._copied_map = zeros(maps.slots.shape, dtype=int32, pin_memory=is_gpu)
        self._copied_totals = zeros((len(maps.slots), 4), dtype=int32, pin_memory=is_gpu)
        self._copied_scores = zeros(maps.slots.shape, dtype=float32, pin_memory=is_gpu)
        self._fetched = np.zeros(len(maps.slots), np.int64)  # by layer, up to the previous step
        # The first step fetches nothing: it tests the model, and would replace experts that the placement has chosen.
        self._has_run = self._has_fetched = False
        self._fetches = False  # the step being launched fetches
        self._device_is_newer = False  # a step has fetched since the host's map was equal to the device's
        self._counts: Ids = self._copied.numpy()
        self._cached_layers: Mask = np.any(movable, axis=1)
        self._pool_reads, self._reads = pool_reads, 0  # reads up to the previous step
        self._bytes_of = np.array([slots.bytes_of(layer) for layer in range(len(movable))])
        self.policy: Policy = _C.ExpertCachePolicy(maps.on_gpu, movable, DECAY, PAYS)
        self._streams = False  # the running step streams experts
        self._ran = False
        self._has_news = False  # a step that the policy has not learnt from
        self._disk = disk
        self._coming: Batch | None = None
        self._sources: Batch | None = None  # `_coming` with places of panels; None: those are the experts'
        self._without_moves = 0  # number of latest choices without a promotion
        self._hits = self._misses = self._promotions = self._bytes = 0
        self._taken = self.totals

    def before_step(
        self, *, streams: bool, rows: int = 1, until_ended: Callable[[], None] = lambda: None
    ) -> None:
        """Launches the map changes. streams: the step streams RAM experts itself; the slots then stay unchanged
        during it. rows: of the step, padding included. until_ended: waits for the running step, if there is one."""
        fetches = self._fetch is not None and not streams and self._fetch.takes(rows)
        # What a streamed prompt has used decides what comes next, so its counts are waited for.
        learns = self._device_is_newer or self._without_moves < QUIET
        if streams or self._streams or (not fetches and learns):
            until_ended()
        if self._device_is_newer and not fetches:
            self._adopt()
        changed = self._land(wait=streams or fetches)
        if self._ran:
            self._observe()
            if not streams and not fetches and not self._slots.is_filling:
                # After a prompt its hottest experts are promoted at once; during decoding only what pays.
                ready = None if self._disk is None else self._disk.ready()
                changed |= self._start(
                    self.policy.choose(self._slots.most, pays=not self._streams, ready=ready)
                )
        if changed:
            self._maps.publish()
        self._slots.free()
        self._streams, self._ran = streams, True
        self._fetches, self._has_run = fetches and self._has_run, True
        if self._fetches and not self._device_is_newer:
            self._start_fetching()

    def after_launch(self) -> None:
        """Launches the copies, and the download of the counts, which arrive when the step has ended."""
        if self._coming is not None and not self._slots.is_filling:
            self._slots.fill(self._coming, self._sources)
        self._copied.copy_(self._on_device, non_blocking=True)
        self._device_is_newer |= self._fetches
        if self._device_is_newer:
            assert self._fetch is not None
            self._copied_map.copy_(self._maps.slots, non_blocking=True)
            self._copied_totals.copy_(self._fetch.totals, non_blocking=True)
        if self._has_news:
            self.policy.learn()
            self._has_news = False

    def compile(self) -> None:
        """Launches every kernel that the copies need. Must be called inside `compile_ahead`."""
        self._slots.compile()

    def capture(self) -> None:
        """Captures the copies. Must be called after `compile_ahead` and before the first step."""
        self._slots.capture()

    def forget_counts(self) -> None:
        """Discards the counts of dummy steps, which have ended; the device's counts are zero again."""
        if self._device_is_newer:
            self._copied_map.copy_(self._maps.slots)
            self._adopt()
        self.policy.forget()
        self._reads = self._pool_reads(self._cached_layers)
        self._fetched += self._newly_fetched()
        self._ran = self._has_news = False

    @property
    def totals(self) -> ExpertCacheCounts:
        """Counts since start-up."""
        return ExpertCacheCounts(self._hits, self._misses, self._promotions, self._bytes)

    def take_counts(self) -> ExpertCacheCounts:
        """Counts since the last call."""
        before, self._taken = self._taken, self.totals
        return self._taken.since(before)

    def _start_fetching(self) -> None:
        """Hands the choice over to the steps, which know nothing of the use by steps that fetched nothing."""
        assert self._fetch is not None
        if not self._has_fetched:
            self._fetch.start()
            self._has_fetched = True
        self._copied_scores.numpy()[:] = self.policy.scores()
        self._fetch.set_scores(self._copied_scores)

    def _adopt(self) -> None:
        """Takes over the map of the last step, which has ended."""
        self._maps.adopt(self._copied_map.numpy())
        self.policy.adopt(self._maps.on_gpu)
        self._device_is_newer = False
        self._without_moves = 0

    def _newly_fetched(self) -> Ids:
        """int64 [layers]: experts fetched by the steps since `_fetched`, as far as they have ended."""
        return (self._copied_totals.numpy()[:, 1] - self._fetched) % (1 << 32)

    def _land(self, *, wait: bool) -> bool:
        """Adds the experts that have arrived to the host's maps."""
        if not self._slots.is_filling or not self._slots.filled(wait=wait):
            return False
        assert self._coming is not None
        self._maps.land(self._coming)
        self._coming = None
        if self._disk is not None:
            self._disk.release()
        return True

    def _observe(self) -> None:
        """Records the experts that the last step used. Misses are counted by the pool, because experts arrive while
        a step runs."""
        used = self.policy.observe(self._counts, streamed=self._streams)
        reads = self._pool_reads(self._cached_layers)
        misses, self._reads = reads - self._reads, reads
        fetched = self._newly_fetched()
        if not self._streams:
            self._has_news = True
            self._fetched += fetched
            self._promotions += int(fetched.sum())
            self._bytes += int((fetched * self._bytes_of).sum())
            misses += int(fetched.sum())
            self._misses += misses
            self._hits += max(0, used - misses)

    def _start(self, moves: Ids) -> bool:
        """Removes the slots of the exchanges from the maps."""
        if not len(moves):
            self._without_moves += 1
            return False
        self._without_moves = 0
        self._coming = self._maps.start(moves)
        self._sources = None if self._disk is None else self._disk.hold(self._coming)
        self._bytes += int(self._bytes_of[moves[:, 0]].sum())
        self._promotions += len(moves)
        return True
