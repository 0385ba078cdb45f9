"""How the KV memory is divided between the layers that attend to all tokens and the windowed ones.

A running request needs the last tokens alone in windowed layers, so their pool is smaller
(docs/explanation/windowed-kv.md). What running requests may need is taken first; the rest of the windowed pool is for
the prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout


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
) -> KvPools:
    """one_pool: slots of a pool for all layers, of `num_bytes`; more than `most` are of no use. step_rows: of the
    largest step. is_divided: layers' KV lies in several memories.

    Raises ConfigError where --kv-window-ratio asks for a second pool that there cannot be.
    """
    ratio = config.kv_window_ratio
    if ratio == 0:
        return KvPools(one_pool)
    reason = _reason_for_one(config, layout, is_divided=is_divided)
    if reason is None:
        pools = _two_pools(config, layout, one_pool, most, num_bytes, step_rows)
        if pools is not None:
            return pools
        reason = "it would have no room for more tokens than one for all layers"
    raise ConfigError(f"--kv-window-ratio {ratio:g}: there can be no second KV pool: {reason}; leave it out")


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
    one_pool: int,
    most: int,
    num_bytes: int,
    step_rows: int,
) -> KvPools | None:
    """None: one pool holds as many tokens. More bytes never make a pool smaller, so that a worker that is started again
    with more memory has at least what the first had."""
    share = config.kv_window_ratio
    windowed = layout.token_bytes(layout.windowed_layers)
    full = layout.token_bytes() - windowed
    # Of running requests, and beside them the rows of a step, which may be padded to a larger one.
    least = config.max_num_seqs * layout.window + 2 * step_rows

    def beside(slots: int) -> int:
        """Window slots that are this share where so many full ones are the rest."""
        return max(least, int(slots * full * share / (windowed * (1 - share))))

    slots = one_pool
    if config.max_total_tokens is None and one_pool < most:
        of_share = max(least, int(num_bytes * share) // windowed)
        slots = min(most, max(0, num_bytes - of_share * windowed) // full)
        if slots <= one_pool:
            return None
        windows = min(of_share, beside(most))
    else:
        windows = beside(slots)
    return KvPools(slots, windows) if windows < slots else None
