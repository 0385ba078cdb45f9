"""Divides the KV memory between full-attention layers and sliding-window layers.

In sliding-window layers a running request needs only its last tokens, so their pool is smaller
(docs/explanation/windowed-kv.md). The window pool has slots for all running requests first; the rest serves the
prefix cache.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import dataclass

from moeserve.config import ServerConfig, num_drafts
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout

SLOTS_FOR_EACH = 3  # default ratio: slots of the full-attention pool per window slot

NO_ROOM = "two would have no room for more tokens than one for all layers"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvPools:
    """The sizes of both KV pools. num_slots: slots of the full-attention layers' pool, or of the only pool.
    num_window_slots: slots of the sliding-window layers' pool; 0 if all layers share one."""

    num_slots: int
    num_window_slots: int = 0


@dataclass(frozen=True, slots=True)
class WindowPool:
    """Sizes of a window pool relative to the full-attention pool. Bytes are per token."""

    full_bytes: int  # in the full-attention layers
    windowed_bytes: int
    share: float  # of the memory of both pools together
    least: int  # slots that running requests may need

    def slots_beside(self, slots: int) -> int:
        """Returns the window slots that make up `share` of the memory beside `slots` full slots. Monotonic in
        `slots`."""
        of_share = slots * self.full_bytes * self.share / (self.windowed_bytes * (1 - self.share))
        return max(self.least, int(of_share))

    def num_bytes(self, tokens: int) -> int:
        """Returns the KV bytes for `tokens` tokens: in two pools, or in one for all layers if that takes no more."""
        return min(self._in_two(tokens), tokens * (self.full_bytes + self.windowed_bytes))

    def _in_two(self, slots: int) -> int:
        return slots * self.full_bytes + self.slots_beside(slots) * self.windowed_bytes

    def divide(self, one_pool: int, most: int, num_bytes: int | None) -> KvPools | None:
        """Divides the memory into two pools; None if one pool would hold as many tokens. one_pool, most: see the
        function `divide`. num_bytes: memory of both; None: the number of full slots is given.

        More bytes never make a pool smaller. A given number of slots gets the same window pool as when it was
        computed from bytes, so that a restarted worker has the same pools as before.
        """
        slots = one_pool
        if num_bytes is not None and one_pool < most:
            # the largest number that fits
            slots = bisect_right(range(most + 1), num_bytes, key=self._in_two) - 1
        windows = self.slots_beside(slots)
        return KvPools(slots, windows) if windows < slots else None


def window_pool(
    config: ServerConfig, layout: KvLayout, step_rows: int, *, is_divided: bool = False
) -> WindowPool | None:
    """Returns the window pool's proportions; None if the sliding-window layers share the pool. step_rows: rows of
    the largest step. is_divided: layers' KV is spread over several devices.

    Raises ConfigError if --kv-window-ratio asks for a separate pool that is impossible.
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
    if share is None:  # the default: what running requests do not need is for the prefix cache
        share = windowed / (windowed + SLOTS_FOR_EACH * full) if config.prefix_cache != "off" else 0.0
    # Running requests: a window each, plus the slots granted ahead for drafts by two plans. In addition the rows of one
    # step, which may be padded to a larger one.
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
    """Returns the numbers of slots of both pools, or of one pool if two would hold no more tokens; in that case raises
    ConfigError if --kv-window-ratio is set. one_pool: slots that `num_bytes` hold in one pool for all layers; most:
    upper limit of useful slots. Other arguments and errors as `window_pool`."""
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
    """Logs whether a model with sliding-window layers got two KV pools and, if not, the reason."""
    if not layout.window or len(layout.windowed_layers) == layout.shape.num_layers:
        return
    if pools.num_window_slots:
        log.info(
            "two KV pools: %d tokens for the layers with a window of %d, %d tokens for the others",
            *(pools.num_window_slots, layout.window, pools.num_slots),
        )
    elif config.kv_window_ratio is None:
        reason = _reason_for_one(config, layout, is_divided=is_divided) or NO_ROOM
        log.info("one KV pool for all layers, including the windowed ones: %s", reason)


def _refused(ratio: float, reason: str) -> ConfigError:
    return ConfigError(
        f"--kv-window-ratio {ratio:g}: a second KV pool is not possible: {reason}; leave the flag out"
    )


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
