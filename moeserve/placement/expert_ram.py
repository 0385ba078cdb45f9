"""Divides the RAM for experts into slots by layer, when not all experts fit."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.capacity import SHARE_OF_FREE_MEMORY
from moeserve.kv.layout import KvLayout
from moeserve.models.interface import ModelShape
from moeserve.placement.expert_pins import Pinned
from moeserve.placement.sizes import ModelSizes

# Memory that stays free by default: for the server's other processes, and pages of the files that they read.
MARGIN_BYTES = 512 << 20
MARGIN_SHARE = 0.05
# Share of the memory beside the dense weights that KV may take from the experts by default.
MOST_KV_SHARE = 0.125
# Pieces of an expert that are read at once, each by a thread: as many keep an NVMe drive busy.
READERS = 8
PIECE_BYTES = 1 << 20  # about; a piece has at least 32 rows
READER_BYTES = READERS * (PIECE_BYTES + 8192)


def dense_bytes(sizes: ModelSizes) -> int:
    """Returns the bytes in RAM of all weights but routed experts."""
    layers = sum(layer.dense.cpu for layer in sizes.layers)
    return sizes.embedding.cpu + sizes.head.cpu + sizes.table_rows + layers


def expert_bytes(sizes: ModelSizes) -> int:
    """Returns the bytes in RAM of all routed experts."""
    return sum(layer.num_experts * layer.expert.cpu for layer in sizes.layers)


def expert_ram_bytes(config: ServerConfig, sizes: ModelSizes, layout: KvLayout, free: int) -> int | None:
    """Returns the bytes of RAM that routed experts may take; None if RAM holds all experts, or too few of them.

    free: bytes that the model may take. With --expert-ram the result is its value, or None if all experts fit into it.
    Without --expert-ram the result is None if all weights fit into `free`. Otherwise it is `free` minus the dense
    weights, a margin, and KV for the requests that may run at once (at most an eighth of `free` minus the dense
    weights); it is None if that cannot hold the experts of one token.
    """
    everything, dense = expert_bytes(sizes), dense_bytes(sizes)
    if config.expert_ram is not None:
        budget = int(config.expert_ram * GIB)
        return None if budget >= everything else budget
    if dense + everything <= free:
        return None
    left = max(0, free - dense)
    longest = config.max_model_len or layout.shape.context_length
    tokens = config.max_total_tokens or config.max_num_seqs * longest
    kv = min(tokens * layout.token_bytes() / SHARE_OF_FREE_MEMORY, MOST_KV_SHARE * left)
    budget = int(left - kv - MARGIN_BYTES - MARGIN_SHARE * left - READER_BYTES)
    return budget if budget >= slot_bytes(sizes, least_slots(layout.shape)) else None


def expert_slots(
    sizes: ModelSizes, shape: ModelShape, budget: int, pinned: Pinned, counts: Sequence[int] | None = None
) -> list[int]:
    """Divides `budget` bytes of RAM: returns how many experts of each layer they hold; 0 for a layer without experts.
    Pinned experts come first; of the other experts each layer gets the same share, at least as many as one token uses.
    counts: for each layer, the number of experts that may be in RAM; None: all. Raises ConfigError if the budget is too
    small."""
    counts = [layer.num_experts for layer in sizes.layers] if counts is None else counts
    stay = [len(experts) for experts in pinned]
    least = [min(count, own + few) for count, own, few in zip(counts, stay, least_slots(shape), strict=True)]
    needed = slot_bytes(sizes, least)
    if needed > budget:
        if any(stay):
            raise ConfigError(
                f"--placement-rules keeps {slot_bytes(sizes, stay) / GIB:.2f} GiB of experts in RAM, which with those "
                f"of one token are {needed / GIB:.2f} GiB; there are {budget / GIB:.2f} GiB for experts: raise "
                "--expert-ram, or let the rules match fewer"
            )
        raise ConfigError(
            f"{budget / GIB:.2f} GiB of RAM for experts are too few: the experts of one token take {needed / GIB:.2f} "
            "GiB; raise --expert-ram, free some memory, or choose a smaller model or quantisation"
        )
    others = slot_bytes(sizes, counts) - slot_bytes(sizes, stay)
    share = (budget - slot_bytes(sizes, stay)) / max(1, others)
    slots = [
        max(few, own + int(share * (count - own)))
        for few, own, count in zip(least, stay, counts, strict=True)
    ]
    # The minimum of some layers may have used up other layers' share.
    while slot_bytes(sizes, slots) > budget:
        fullest = max(range(len(slots)), key=lambda index: slots[index] - least[index])
        slots[fullest] -= 1
    return slots


def least_slots(shape: ModelShape) -> list[int]:
    """Returns how many experts of each layer a token uses."""
    return [0 if layer.moe is None else layer.moe.top_k for layer in shape.layers]


def slot_bytes(sizes: ModelSizes, slots: Sequence[int]) -> int:
    return sum(count * layer.expert.cpu for count, layer in zip(slots, sizes.layers, strict=True))
