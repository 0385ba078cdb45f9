"""MiniMax-M3's tower (https://huggingface.co/MiniMaxAI/MiniMax-M3), for still pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import StretchRule
from moeserve.visualserver.shapes.shape import (
    VISION,
    PixelScale,
    TowerSizes,
    axial_attention_floats,
    input_floats,
    matrix_rows,
    perceptron_floats,
    read_pixel_scale,
    read_sizes,
    stretch_rule,
)

PROJECTOR: Final = "minimax_m3"
DEFAULT_MIN_TOKENS: Final = 4  # the publisher's
DEFAULT_MAX_TOKENS: Final = 576  # the publisher's 451,584 pixels
QKV: Final = ("attn_q", "attn_k", "attn_v")


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxShape(TowerSizes):
    """See `TowerShape`."""

    ffn: int
    inner: int  # inner width of the two networks behind the layers
    eps: float  # of LayerNorms
    pixels: PixelScale

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS

    @property
    def token_floats(self) -> int:
        layers = 2 * self.ffn + 7 * self.hidden
        return self.merge**2 * max(layers, 2 * self.inner + self.output + self.hidden)

    def patch_floats(self, *, is_block_float: bool) -> int:
        """See `TowerShape`."""
        perceptron = perceptron_floats(self.hidden, self.ffn, is_block_float=is_block_float)
        codes = input_floats(self.inner, is_block_float=is_block_float)
        # The first network behind the layers, which has a row for each patch.
        network = self.hidden + max(2 * self.inner, self.inner + codes + self.output)
        return self.most_floats(axial_attention_floats(self.hidden), perceptron, network)

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> StretchRule:
        default = (DEFAULT_MIN_TOKENS, DEFAULT_MAX_TOKENS)
        return stretch_rule(self.token_side, (min_tokens, max_tokens), default)

    def fits(self, text: ModelShape) -> bool:
        return text.architecture == "minimax-m3"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        h, patch = self.hidden, (self.hidden, 3, self.patch, self.patch)
        shapes: dict[str, tuple[int, ...]] = {
            "v.patch_embd.weight": patch,
            "v.patch_embd.weight.1": patch,
            "v.pre_ln.weight": (h,),
            "v.pre_ln.bias": (h,),
        }
        products = {
            "mm.1": (self.inner, h),
            "mm.2": (self.output, self.inner),
            "mm.merger.fc1": (self.inner, self.output * self.merge**2),
            "mm.merger.fc2": (self.output, self.inner),
        }
        for layer in range(self.layers):
            at = f"v.blk.{layer}."
            products |= {f"{at}{name}": (h, h) for name in (*QKV, "attn_out")}
            products |= {f"{at}ffn_up": (self.ffn, h), f"{at}ffn_down": (h, self.ffn)}
            for name in ("ln1", "ln2"):
                shapes |= {f"{at}{name}.weight": (h,), f"{at}{name}.bias": (h,)}
        for name, (rows, columns) in products.items():
            shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
        return shapes


def read_shape(file: TensorSource) -> MiniMaxShape:
    """Reads the tower's shape from its metadata. Raises ModelError if that is missing or unsupported."""
    meta = file.metadata
    return MiniMaxShape(
        **read_sizes(file, parts=2, least_head=6),
        ffn=meta.require_int(VISION + "feed_forward_length", 1, 1 << 18),
        merge=meta.require_int(VISION + "spatial_merge_size", 1, 8, default=2),
        inner=matrix_rows(file, "mm.1.weight"),
        eps=meta.require_float(VISION + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=1e-5),
        pixels=read_pixel_scale(file),
    )
