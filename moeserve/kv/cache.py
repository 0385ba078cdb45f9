"""The KV cache's tensors, on one device."""

from __future__ import annotations

import torch
from torch import Tensor

from moeserve.kernels.stream_operands import KvLayer
from moeserve.kv.layout import BFLOAT16, FLOAT16, FP8, KV_BLOCK, Q8_0, KvLayout

TORCH_TYPES = {
    FLOAT16: torch.float16,
    BFLOAT16: torch.bfloat16,
    Q8_0: torch.int8,
    FP8: torch.float8_e4m3fn,
}


class KvCache:
    """Keys and values of some consecutive layers for `num_slots` tokens, of windowed layers for `num_window_slots`
    where these have a pool of their own. One writer: the attention of those layers."""

    def __init__(
        self,
        layout: KvLayout,
        num_slots: int,
        layers: range,
        device: torch.device | str = "cpu",
        *,
        zeroed: bool = False,
        num_window_slots: int = 0,
    ) -> None:
        """zeroed: for kernels that read masked keys, through which a NaN of before would come back. Otherwise pages of
        RAM come with their first use, so that an idle cache costs no memory. num_window_slots: 0: the layers have one
        pool."""
        allocate = torch.zeros if zeroed else torch.empty
        latent, dtype = layout.shape.latent, layout.dtype

        def kv_layer(layer: int) -> KvLayer:
            a = layout.shape.loaded_layers[layer].attention
            has_window_slots = num_window_slots > 0 and layout.is_windowed(layer)
            slots = num_window_slots if has_window_slots else num_slots
            has_own = a is not None and len(a.kv_widths) > 0
            rows = (slots, a.num_kv_heads) if a is not None and has_own else (0, 1)
            widths = a.kv_widths if a is not None and has_own else (KV_BLOCK,)
            scales = (*rows, dtype.num_scales(widths[0]))

            def numbers(width: int) -> Tensor:
                return allocate((*rows, width), dtype=TORCH_TYPES[dtype], device=device)

            def scale_of_each() -> Tensor | None:
                return allocate(scales, dtype=torch.float16, device=device) if scales[2] else None

            keys = numbers(widths[0])
            if latent is not None:
                return KvLayer(keys, keys[:, :, : latent.rank])
            of_layer = KvLayer(keys, numbers(widths[-1]), scale_of_each(), scale_of_each())
            if (
                has_window_slots and has_own
            ):  # where a table's unused entries lead, from which masked keys are read
                for tensor in of_layer.tensors:
                    tensor[0] = 0
            return of_layer

        # Of each layer: keys and values [slots, kv_heads, width], of 8 bits with scales; empty for one that does not
        # attend, or attends to another's. Of latent attention: keys [slots, 1, rank + rotary_dim], whose first `rank`
        # numbers are the values.
        self.layers = [kv_layer(layer) for layer in layers]
