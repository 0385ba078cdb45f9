"""Sizes the KV pool in tokens, and the longest request that it allows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.kv.slot_kinds import entry_bytes, num_slot_numbers, slot_kinds
from moeserve.kv.window_capacity import KvPools, divide, log_pools
from moeserve.messages.slot_kinds import SlotKind

# Default share of the memory left after the weights that the KV pool takes. The rest is for the operating system's page
# cache and the other processes.
SHARE_OF_FREE_MEMORY = 0.5
LEAST_TOKENS = 64  # smaller pools are refused

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvMemoryBudget:
    """Memory available for the KV of some layers. A token takes a slot in every layer, so the smallest budget
    decides."""

    kind: str  # "memory" or "GPU memory", used in messages
    free_bytes: int  # left after the weights and, on a GPU, the step buffers
    layers: range | None  # None: all layers, and a drafting model
    share: float = 1.0  # default share of `free_bytes` for KV

    def tokens(self, layout: KvLayout, share: float = 1.0) -> int:
        return max(0, int(self.free_bytes * share) // max(1, layout.token_bytes(self.layers)))


@dataclass(frozen=True, slots=True)
class KvCapacity:
    num_slots: int
    max_model_len: int
    num_window_slots: int = 0  # slots of the sliding-window layers' own pool; 0: all layers share one pool
    kinds: tuple[SlotKind, ...] = ()  # of slots; empty: all are alike

    @property
    def num_slot_numbers(self) -> int:
        """KV slots of all kinds together, of which num_slots are held at once."""
        return num_slot_numbers(self.kinds, self.num_slots)

    @property
    def num_whole_slots(self) -> int:
        """The first KV slots, which have room in every layer that keeps something in slots."""
        return self.kinds[0].num_slots if self.kinds else self.num_slots

    def kv_bytes(self, layout: KvLayout) -> int:
        """Returns the bytes of all KV pools."""
        if self.kinds:
            return entry_bytes(layout, self.kinds) + self.num_slot_numbers * layout.beside_bytes
        windowed = layout.token_bytes(layout.windowed_layers) if self.num_window_slots else 0
        return self.num_slots * (layout.token_bytes() - windowed) + self.num_window_slots * windowed


def plan_capacity(
    config: ServerConfig,
    layout: KvLayout,
    budgets: Sequence[KvMemoryBudget],
    step_rows: int = 0,
) -> KvCapacity:
    """Returns the number of KV slots and the maximal request length in tokens. budgets: one per device that holds
    layers; together they cover all layers. step_rows: rows of the largest step; 0: sliding-window layers share the
    pool of the others.

    Raises ConfigError if the sizes that the user asked for do not fit; the message says what would fit.
    """
    context_length = layout.shape.context_length
    wanted_len = config.max_model_len or context_length
    tightest = min(budgets, key=lambda budget: budget.tokens(layout, budget.share))
    fitting = tightest.tokens(layout, tightest.share)
    if config.max_total_tokens is not None:
        slots = config.max_total_tokens
    else:
        slots = min(config.max_num_seqs * wanted_len, fitting)
    pools = KvPools(slots)
    if step_rows:
        budget_bytes = int(tightest.free_bytes * tightest.share)
        most = config.max_num_seqs * wanted_len
        pools = divide(
            *(config, layout, slots, most, budget_bytes, step_rows),
            is_divided=len(budgets) > 1,
        )
        log_pools(config, layout, pools, is_divided=len(budgets) > 1)
        slots = pools.num_slots
    if config.max_total_tokens is not None:
        for each in budgets:
            _check_total(slots, pools.num_window_slots, each, layout)
    if slots < min(wanted_len, LEAST_TOKENS):
        raise ConfigError(
            f"only {tightest.free_bytes / GIB:.2f} GiB of {tightest.kind} are free after the weights, room for "
            f"{fitting} tokens of KV: free some memory, or choose a smaller model"
        )
    if config.max_model_len is not None and config.max_model_len > slots:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} does not fit a KV pool of {slots} tokens: lower it, or raise "
            f"--max-total-tokens ({layout.token_bytes()} bytes a token)"
        )
    if wanted_len > slots:
        log.warning("the KV pool holds %d tokens: requests are limited to that, not to %d", slots, wanted_len)
    if wanted_len > context_length:
        log.warning(
            "requests may have %d tokens; the model was trained for %d, beyond which its answers may be nonsense",
            wanted_len,
            context_length,
        )
    kinds = tuple(slot_kinds(layout, slots, config.max_num_seqs))
    return KvCapacity(slots, min(wanted_len, slots), pools.num_window_slots, kinds)


def _check_total(slots: int, window_slots: int, budget: KvMemoryBudget, layout: KvLayout) -> None:
    needed = slots * layout.token_bytes(budget.layers)
    if window_slots:
        needed -= (slots - window_slots) * layout.token_bytes(layout.windowed_layers)
    if needed > budget.free_bytes:
        raise ConfigError(
            f"--max-total-tokens {slots} needs {needed / GIB:.1f} GiB for the KV pool, but "
            f"{budget.free_bytes / GIB:.1f} GiB are free after the weights; ask for at most "
            f"{budget.tokens(layout, budget.share)}"
        )
