"""The tower of GLM-4.1V, GLM-4.5V and GLM-4.6V (https://arxiv.org/abs/2507.01006), for still pictures."""

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
    position_side,
    read_pixel_scale,
    read_sizes,
    stretch_rule,
)

PROJECTOR: Final = "glm4v"
DEFAULT_MIN_TOKENS: Final = 8  # the publisher's, as 112 x 112 pixels of a video's two frames
DEFAULT_MAX_TOKENS: Final = 4096  # llama.cpp's; the publisher's own is 6,144


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmShape(TowerSizes):
    """See `TowerShape`."""

    # Width of the network behind the layers; the layers' feed-forwards have the width `output`.
    merger_ffn: int
    positions: int  # a side of the learned table, in patches
    eps: float  # of RMS norms
    pixels: PixelScale

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS

    @property
    def token_floats(self) -> int:
        return max(self.merge**2 * (3 * self.output + 7 * self.hidden), 3 * self.merger_ffn + 4 * self.output)

    def patch_floats(self, *, is_block_float: bool) -> int:
        """See `TowerShape`."""
        per_token = self.merge**2
        # x, its norm, gate and up; in the merger x, the joined patches, gelu's result, gate and up.
        layers = 2 * self.hidden + 2 * self.output + input_floats(self.hidden, is_block_float=is_block_float)
        codes = input_floats(self.output, is_block_float=is_block_float)
        merger = 2 * self.hidden + (2 * self.output + 2 * self.merger_ffn + codes) // per_token
        return self.most_floats(axial_attention_floats(self.hidden), layers, merger)

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> StretchRule:
        default = (DEFAULT_MIN_TOKENS, DEFAULT_MAX_TOKENS)
        return stretch_rule(self.token_side, (min_tokens, max_tokens), default, enlarges_sides=True)

    def fits(self, text: ModelShape) -> bool:
        return text.rope_sections is not None and text.sections_in_blocks

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        h, out, patch = self.hidden, self.output, (self.hidden, 3, self.patch, self.patch)
        shapes: dict[str, tuple[int, ...]] = {
            "v.patch_embd.weight": patch,
            "v.patch_embd.weight.1": patch,
            "v.patch_embd.bias": (h,),
            "v.norm_embd.weight": (h,),
            "v.position_embd.weight": (self.positions**2, h),
            "v.post_ln.weight": (h,),
            "mm.patch_merger.weight": (out, h, self.merge, self.merge),
            "mm.patch_merger.bias": (out,),
            "mm.model.fc.weight": (out, out),
            "mm.post_norm.weight": (out,),
            "mm.post_norm.bias": (out,),
            "mm.gate.weight": (self.merger_ffn, out),
            "mm.up.weight": (self.merger_ffn, out),
            "mm.down.weight": (out, self.merger_ffn),
        }
        for layer in range(self.layers):
            at = f"v.blk.{layer}."
            shapes |= {
                f"{at}ln1.weight": (h,),
                f"{at}ln2.weight": (h,),
                f"{at}attn_qkv.weight": (3 * h, h),
                f"{at}attn_out.weight": (h, h),
                f"{at}ffn_gate.weight": (out, h),
                f"{at}ffn_up.weight": (out, h),
                f"{at}ffn_down.weight": (h, out),
            }
        return shapes


def read_shape(file: TensorSource) -> GlmShape:
    """Returns the sizes of the tower from its metadata. Raises ModelError if one is missing or unsupported."""
    meta = file.metadata
    return GlmShape(
        **read_sizes(file),
        merger_ffn=meta.require_int(VISION + "feed_forward_length", 1, 1 << 18),
        merge=meta.require_int(
            VISION + "spatial_merge_size", 1, 8, default=2
        ),  # llama.cpp's files have no key
        positions=position_side(file),
        eps=meta.require_float(VISION + "attention.layer_norm_epsilon", 1e-12, 1e-2),
        pixels=read_pixel_scale(file),
    )
