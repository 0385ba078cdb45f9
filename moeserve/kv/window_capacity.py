"""How the KV memory is divided between the layers that attend to all tokens and the windowed ones.

A running request needs the last tokens alone in windowed layers, so their pool is smaller
(docs/explanation/windowed-kv.md). What running requests may need is taken first; the rest of the windowed pool is for
the prefix cache.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass

from moeserve.config import ServerConfig, num_drafts
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout

SLOTS_FOR_EACH = 3  # slots of the other layers' pool for a windowed one, where the user does not say

NO_ROOM = "two would have no room for more tokens than one for all layers"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvPools:
    """Slots of the pool of all layers, or of the layers without a window, and of the windowed layers' pool, 0: none."""

    num_slots: int
    num_window_slots: int = 0


@dataclass(frozen=True, slots=True)
class WindowPool:
    """The memory of a windowed pool in relation to the full one. Bytes are those of one token."""

    full_bytes: int  # in the layers that attend to all tokens
    windowed_bytes: int
    share: float  # of the memory of both pools
    least: int  # slots that running requests may need

    def slots_beside(self, slots: int) -> int:
        """Window slots that are this share where `slots` slots are the rest. Never fewer for more."""
        of_share = slots * self.full_bytes * self.share / (self.windowed_bytes * (1 - self.share))
        return max(self.least, int(of_share))

    def num_bytes(self, tokens: int) -> int:
        """Bytes of the KV of `tokens` tokens: in two pools, or in one for all layers where that takes no more."""
        return min(self._in_two(tokens), tokens * (self.full_bytes + self.windowed_bytes))

    def _in_two(self, slots: int) -> int:
        return slots * self.full_bytes + self.slots_beside(slots) * self.windowed_bytes

    def divide(self, one_pool: int, most: int, num_bytes: int | None) -> KvPools | None:
        """one_pool, most: as of `divide`; num_bytes: None: the slots are given. None: one pool holds as many tokens.

        More bytes never make a pool smaller, and as many slots have the same pool beside them when they are given as
        when they were found: so a worker that is started again can stand in for the first."""
        slots = one_pool
        if num_bytes is not None and one_pool < most:
            slots = bisect_right(range(most + 1), num_bytes, key=self._in_two) - 1  # as many as fit
        windows = self.slots_beside(slots)
        return KvPools(slots, windows) if windows < slots else None


def window_pool(
    config: ServerConfig, layout: KvLayout, step_rows: int, *, is_divided: bool = False
) -> WindowPool | None:
    """None where windowed layers have no pool of their own. step_rows: of the largest step. is_divided: layers' KV lies
    in several memories.

    Raises ConfigError where --kv-window-ratio asks for one that there cannot be.
    """
    if config.kv_window_ratio == 0:
        return None
    reason = _reason_for_one(config, layout, is_divided=is_divided)
    if reason is not None:
        if config.kv_window_ratio is not None:
            raise _refused(config.kv_window_ratio, reason)
        return None
    windowed = layout.token_bytes(layout.windowed_layers)
    full = layout.token_bytes() - windowed
    share = config.kv_window_ratio
    if share is None:  # what running requests do not need is for the prefix cache
        share = windowed / (windowed + SLOTS_FOR_EACH * full) if config.prefix_cache != "off" else 0.0
    # Of running requests, with those that two plans grant ahead of need for drafts, and beside them the rows of a step,
    # which may be padded to a larger one.
    each = layout.window + 2 * num_drafts(config)
    return WindowPool(full, windowed, share, config.max_num_seqs * each + 2 * step_rows)


def divide(
    config: ServerConfig,
    layout: KvLayout,
    one_pool: int,
    most: int,
    num_bytes: int,
    step_rows: int,
    *,
    is_divided: bool = False,
) -> KvPools:
    """one_pool: slots of a pool for all layers, of `num_bytes`; more than `most` are of no use. Otherwise as
    `window_pool`, and one pool where two would hold no more."""
    second = window_pool(config, layout, step_rows, is_divided=is_divided)
    if second is None:
        return KvPools(one_pool)
    pools = second.divide(one_pool, most, num_bytes if config.max_total_tokens is None else None)
    if pools is not None:
        return pools
    if config.kv_window_ratio is not None:
        raise _refused(config.kv_window_ratio, NO_ROOM)
    return KvPools(one_pool)


def log_pools(config: ServerConfig, layout: KvLayout, pools: KvPools, *, is_divided: bool) -> None:
    """Logs whether a model that could have two KV pools has them, and if not, why."""
    if not layout.window or len(layout.windowed_layers) == layout.shape.num_layers:
        return
    if pools.num_window_slots:
        log.info(
            "windowed layers have a KV pool of their own, of %d tokens beside %d, for what a window of %d reads",
            *(pools.num_window_slots, pools.num_slots, layout.window),
        )
    elif config.kv_window_ratio is None:
        reason = _reason_for_one(config, layout, is_divided=is_divided) or NO_ROOM
        log.info("one KV pool for all layers, windowed ones too: %s", reason)


def _refused(ratio: float, reason: str) -> ConfigError:
    return ConfigError(f"--kv-window-ratio {ratio:g}: there can be no second KV pool: {reason}; leave it out")


def _reason_for_one(config: ServerConfig, layout: KvLayout, *, is_divided: bool) -> str | None:
    if not layout.window:
        return "all layers of this model attend to all tokens"
    if len(layout.windowed_layers) == layout.shape.num_layers:
        return "all layers of this model are windowed"
    if layout.state_bytes():
        return "this model has recurrent state"
    if config.kv_disk is not None or config.kv_ram:
        return "tiers behind the KV pool (--kv-disk, --kv-ram) keep whole tokens"
    if config.gpus != "1":
        return "several GPUs have one pool"
    if is_divided:
        return "some layers are the CPU's"
    return None
