"""The expert cache: between two steps, what the last one used decides which experts come to the GPU.

    before_step     what has arrived enters the maps; the last step's misses choose what comes next, whose slots leave
                    the maps
    (the step is launched)
    after_launch    the copies, beside the step; and the step's counts of tokens to the host

The policy is `moeserve.expert_cache`'s, the copies are `models/loading/expert_slots.py`'s.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.expert_cache.policy import CachePolicy, Mask, Move
from moeserve.expert_cache.promotion_budget import PromotionBudget
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.models.loading.expert_maps import ExpertMaps
from moeserve.models.loading.expert_slots import ExpertSlots, Filling

STEP_BYTES = 128 << 20  # at most, in the background of one step: 46 experts of Qwen3-30B-A3B in Q4_K_M


class _Coming(NamedTuple):
    layer: int
    expert: int
    slot: int


class ExpertCache:
    """Owns the maps' changes and the slots' contents. A step ends before the next one's `before_step`."""

    def __init__(
        self, maps: ExpertMaps, slots: ExpertSlots, movable: Mask, expert_token_counts: Tensor
    ) -> None:
        """movable: [layers, experts], those that may come and go, all of which lie in RAM. expert_token_counts: int64
        [layers, experts] on the device, written by the steps."""
        self._maps, self._slots = maps, slots
        self._on_device = expert_token_counts
        is_gpu = expert_token_counts.device.type == "cuda"
        self._copied = torch.zeros(expert_token_counts.shape, dtype=torch.int64, pin_memory=is_gpu)
        self._counts = self._copied.numpy().copy()  # up to the step before
        self._cached_layers: Mask = np.any(movable, axis=1, keepdims=True)
        self._num_slots = (maps.on_gpu & movable).sum(axis=1)
        self._bytes_of = np.array([slots.bytes_of(layer) for layer in range(len(movable))])
        self._policy = CachePolicy(maps.on_gpu, movable)
        self._budget = PromotionBudget(movable.shape, slots.most)
        self._found = maps.on_gpu  # what the step under way finds on the GPU
        self._streams = False  # it brings experts itself
        self._ran = False
        self._coming: list[_Coming] = []
        self._hits = self._misses = self._promotions = self._bytes = 0
        self._taken = self.totals

    def before_step(self, *, streams: bool) -> None:
        """Launches the maps' changes. streams: the step brings experts in RAM to the GPU by itself: then every slot
        holds an expert during it, and nothing else is copied."""
        changed = self._land(wait=streams)
        used = self._observe() if self._ran else None
        if used is not None and not streams and not self._slots.is_filling:
            changed |= self._start(self._choose(used))
        if changed:
            self._maps.publish()
        self._slots.free()
        self._found, self._streams, self._ran = self._maps.on_gpu, streams, True

    def after_launch(self) -> None:
        """Launches the copies, and the counts' to the host, which has them when the step has ended."""
        if self._coming and not self._slots.is_filling:
            places = self._maps.places
            self._slots.fill(
                [Filling(layer, int(places[layer, expert]), slot) for layer, expert, slot in self._coming]
            )
        self._copied.copy_(self._on_device, non_blocking=True)

    def compile(self) -> None:
        """Within `compile_ahead`: every kernel that the copies need."""
        self._slots.compile()

    def forget_counts(self) -> None:
        """The tokens counted so far were nobody's, and the device's counts are zeros again."""
        self._counts[:] = 0
        self._ran = False

    @property
    def totals(self) -> ExpertCacheCounts:
        """Since the start."""
        return ExpertCacheCounts(self._hits, self._misses, self._promotions, self._bytes)

    def take_counts(self) -> ExpertCacheCounts:
        """Since the last call."""
        now, before = self.totals, self._taken
        self._taken = now
        return ExpertCacheCounts(
            now.hits - before.hits,
            now.misses - before.misses,
            now.promotions - before.promotions,
            now.bytes - before.bytes,
        )

    def _land(self, *, wait: bool) -> bool:
        """What has arrived can be used from here on."""
        if not self._slots.is_filling or not self._slots.filled(wait=wait):
            return False
        self._maps.put(*np.array(self._coming, np.int64).T)
        self._coming = []
        return True

    def _observe(self) -> Mask:
        """Returns what the last step used, as the policy has it."""
        counts: npt.NDArray[np.int64] = self._copied.numpy()
        tokens = counts - self._counts
        self._counts[:] = counts
        used: Mask = (tokens > 0) & self._cached_layers
        if self._streams:
            used &= self._hottest(tokens)
        else:
            hits, wanted = int(np.count_nonzero(used & self._found)), int(np.count_nonzero(used))
            self._hits, self._misses = self._hits + hits, self._misses + wanted - hits
            self._budget.observe(used, self._policy.cached)
        self._policy.observe(used)
        return used

    def _hottest(self, tokens: npt.NDArray[np.int64]) -> Mask:
        """[layers, experts]: a long prompt uses them all, so that what it used most stands for it: no more of a layer
        than have slots there."""
        rank = np.argsort(np.argsort(-tokens, axis=1, kind="stable"), axis=1)
        hottest: Mask = rank < self._num_slots[:, None]
        return hottest

    def _choose(self, used: Mask) -> list[Move]:
        """A prompt leaves its hottest behind at once; text brings what it misses as long as that pays."""
        if self._streams:
            return self._policy.choose(used, self._slots.most)
        moves = self._policy.choose(used, self._budget.take())
        self._budget.promoted(moves)
        return moves

    def _start(self, moves: list[Move]) -> bool:
        """The slots leave the maps."""
        if not moves:
            return False
        layers, incoming, outgoing = np.array(moves, np.int64).T
        slots = self._maps.remove(layers, outgoing)
        self._coming = list(map(_Coming, layers.tolist(), incoming.tolist(), slots.tolist()))
        self._bytes += int(self._bytes_of[layers].sum())
        self._promotions += len(moves)
        return True
