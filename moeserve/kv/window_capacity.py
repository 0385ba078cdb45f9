"""How the KV memory is divided between the layers that attend to all tokens and the windowed ones.

A running request needs the last tokens alone in windowed layers, so their pool is smaller
(docs/explanation/windowed-kv.md). What running requests may need is taken first; the rest of the windowed pool is for
the prefix cache.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout

DEFAULT_RATIO = 0.25  # of the KV memory

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KvPools:
    """Slots of all layers, or of those that are not windowed; and of the windowed ones' own pool, 0: there is none."""

    num_slots: int
    num_window_slots: int = 0


def divide(
    config: ServerConfig,
    layout: KvLayout,
    one_pool: int,
    most: int,
    num_bytes: int,
    step_rows: int,
    *,
    is_divided: bool = False,
    by_default: bool = True,
) -> KvPools:
    """one_pool: slots of a pool for all layers, of `num_bytes`; more than `most` are of no use. step_rows: of the
    largest step. is_divided: layers' KV lies in several memories. by_default: there is a second pool where the user
    does not say.

    Raises ConfigError where --kv-window-ratio asks for a second pool that there cannot be.
    """
    ratio = config.kv_window_ratio
    if ratio == 0:
        return KvPools(one_pool)
    reason = _reason_for_one(config, layout, is_divided=is_divided)
    pools = KvPools(one_pool)
    is_short = config.max_total_tokens is None and one_pool < most
    if reason is None and ratio is None and not is_short:
        reason = "memory does not limit it"
    elif reason is None and ratio is None and not by_default:
        reason = "two pools have not run on a GPU yet; --kv-window-ratio asks for them"
    if reason is None:
        share = DEFAULT_RATIO if ratio is None else ratio
        pools = _two_pools(config, layout, share, one_pool, most, num_bytes, step_rows)
        if not pools.num_window_slots:
            reason = "it would have no room for more tokens than one for all layers"
    if ratio is not None and reason is not None:
        raise ConfigError(
            f"--kv-window-ratio {ratio:g}: there can be no second KV pool: {reason}; leave it out"
        )
    if layout.window and reason is not None:
        log.info("windowed layers have no KV pool of their own: %s", reason)
    return pools


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


def _two_pools(
    config: ServerConfig,
    layout: KvLayout,
    share: float,
    one_pool: int,
    most: int,
    num_bytes: int,
    step_rows: int,
) -> KvPools:
    windowed = layout.token_bytes(layout.windowed_layers)
    full = layout.token_bytes() - windowed
    # Of running requests, and beside them the rows of a step, which may be padded to a larger one.
    least = config.max_num_seqs * layout.window + 2 * step_rows
    if config.max_total_tokens is not None or one_pool >= most:
        slots = one_pool
        of_share = int(slots * full * share / (windowed * (1 - share)))
    else:
        of_share = int(num_bytes * share) // windowed
        slots = min(most, max(0, num_bytes - max(least, of_share) * windowed) // full)
        if slots <= one_pool:
            return KvPools(one_pool)
    window_slots = max(least, of_share)
    return KvPools(slots, window_slots) if window_slots < slots else KvPools(one_pool)
