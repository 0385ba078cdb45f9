"""The tensors of the KV cache on one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moeserve.kernels.stream_operands import KeyRings, KvLayer
from moeserve.kv.layout import BFLOAT16, FLOAT16, FP8, KV_BLOCK, Q8_0, KvLayout
from moeserve.kv.slot_kinds import rows_for
from moeserve.messages.slot_kinds import SlotKind
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.latent import LatentAttentionShape

TORCH_TYPES = {
    FLOAT16: torch.float16,
    BFLOAT16: torch.bfloat16,
    Q8_0: torch.int8,
    FP8: torch.float8_e4m3fn,
}


class KvCache:
    """Keys and values of consecutive layers: `num_slots` tokens per layer, or `num_window_slots` in sliding-window
    layers that have a separate pool. Only the attention of those layers writes to it."""

    def __init__(
        self,
        layout: KvLayout,
        num_slots: int,
        layers: range,
        device: torch.device | str = "cpu",
        *,
        zeroed: bool = False,
        num_window_slots: int = 0,
        kinds: Sequence[SlotKind] = (),
        num_states: int = 0,
        step_rows: int = 0,
    ) -> None:
        """zeroed: fill the cache with zeros. Needed where kernels read masked keys, because a leftover NaN would
        pass the mask. Without it, the operating system allocates RAM pages at first use, so an idle cache costs no
        memory. num_window_slots: slots of the sliding-window layers' pool; 0: all layers share one pool. For compressed
        attention: kinds of slots; a layer has rows only for its own kinds (none: for all slots); num_states: state
        slots; step_rows: rows of the largest step."""
        allocate = torch.zeros if zeroed else torch.empty
        dtype = layout.dtype

        def kv_layer(layer: int) -> KvLayer:
            a = layout.shape.loaded_layers[layer].attention
            has_window_slots = num_window_slots > 0 and layout.is_windowed(layer)
            slots = num_window_slots if has_window_slots else num_slots
            block = layout.block(layer) if kinds else 1
            if block > 1:
                slots = rows_for(kinds, block)
            has_own = a is not None and len(a.kv_widths) > 0
            rows = (slots, a.num_kv_heads) if a is not None and has_own else (0, 1)
            widths = a.kv_widths if a is not None and has_own else (KV_BLOCK,)
            scales = (*rows, dtype.num_scales(widths[0]))

            def numbers(width: int) -> Tensor:
                return allocate((*rows, width), dtype=TORCH_TYPES[dtype], device=device)

            def scale_of_each() -> Tensor | None:
                return allocate(scales, dtype=torch.float16, device=device) if scales[2] else None

            def numbers_to_choose_by() -> Tensor | None:
                width = 0 if a is None else a.index_width
                return allocate((slots, 1, width), dtype=torch.float16, device=device) if width else None

            index_keys = numbers_to_choose_by()
            if isinstance(a, CompressedAttentionShape):
                rings = KeyRings(slots if has_own else 0, a.ring_rows, num_states)
                shape = (rings.end + step_rows, 1, a.head_dim)
                entries = allocate(shape, dtype=TORCH_TYPES[dtype], device=device)
                return KvLayer(entries, entries, index_keys=index_keys, rings=rings, block=block)
            keys = numbers(widths[0])
            if isinstance(a, LatentAttentionShape):
                return KvLayer(keys, keys[:, :, : a.rank], index_keys=index_keys)
            of_layer = KvLayer(keys, numbers(widths[-1]), scale_of_each(), scale_of_each(), index_keys)
            if (
                has_window_slots and has_own
            ):  # slot 0: unused entries of a slot table point there, and kernels read masked keys from it
                for tensor in of_layer.tensors:
                    tensor[0] = 0
            return of_layer

        # One entry per layer: keys and values [slots, kv_heads, width], and scales if the dtype has 8 bits. The tensors
        # are empty for a layer without attention and for one that reads another layer's KV. In latent attention: keys
        # [slots, 1, rank + rotary_dim]; their first `rank` numbers are also the values. In compressed attention: keys
        # [rows, 1, head_dim], which are also the values: one for a slot with an entry, then the rings, then a step's.
        # index_keys [slots, 1, width] in layers with an indexer of their own.
        self.layers = [kv_layer(layer) for layer in layers]
