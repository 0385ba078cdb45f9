"""Qwen3-VL's tower (https://arxiv.org/abs/2511.21631); Qwen3.5's and 3.6's are the same without DeepStack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import FrameRule, StretchRule
from moeserve.visualserver.shapes.layer_norm_sizes import LayerNormSizes, with_biases
from moeserve.visualserver.shapes.shape import (
    VISION,
    PixelScale,
    check_pixels,
    position_side,
    read_sizes,
    stretch_rule,
)

PROJECTOR: Final = "qwen3vl_merger"
# The file has no bounds of a picture's size. llama.cpp assumes these bounds for the projector.
DEFAULT_MIN_TOKENS: Final = 8
DEFAULT_MAX_TOKENS: Final = 4096
# Of videos, the publisher's: pixels of all frames together, and tokens of two frames, which become one.
MIN_VIDEO_PIXELS: Final = 4096
MOST_FRAME_TOKENS: Final = 768

_HALF: Final = 0.5  # mean and deviation of the pixels, of each channel


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VlShape(LayerNormSizes):
    """See `TowerShape`."""

    positions: int  # a side of the learned table, in patches
    deep: tuple[
        int, ...
    ] = ()  # layers whose outputs also become tokens, for the text model's first layers (DeepStack)

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS

    @property
    def pixels(self) -> PixelScale:
        return PixelScale((_HALF,) * 3, (_HALF,) * 3)

    def patch_floats(self, *, is_block_float: bool) -> int:
        """See `TowerShape`."""
        # Tokens of DeepStack that are there while the last layer computes.
        deep = sum(layer + 1 < self.layers for layer in self.deep) * self.output // self.merge**2
        return self.most_floats(self.layer_floats(is_block_float=is_block_float) + deep)

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> StretchRule:
        default = (DEFAULT_MIN_TOKENS, DEFAULT_MAX_TOKENS)
        return stretch_rule(self.token_side, (min_tokens, max_tokens), default)

    def frame_rule(self, max_tokens: int) -> FrameRule:
        area = self.token_side**2
        return FrameRule(self.token_side, MIN_VIDEO_PIXELS, 2 * max_tokens * area, MOST_FRAME_TOKENS * area)

    @property
    def embedding_size(self) -> int:
        return self.output * (1 + len(self.deep))

    def fits(self, text: ModelShape) -> bool:
        return text.rope_sections is not None and not text.sections_in_blocks

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        h, joined = self.hidden, self.hidden * self.merge**2
        patch = (h, 3, self.patch, self.patch)
        shapes: dict[str, tuple[int, ...]] = {
            "v.patch_embd.weight": patch,
            "v.patch_embd.weight.1": patch,
            "v.patch_embd.bias": (h,),
            "v.position_embd.weight": (self.positions**2, h),
            **self.norm_shapes("v.post_ln"),
            **with_biases({"mm.0": (joined, joined), "mm.2": (self.output, joined)}),
            **self.layer_shapes(),
        }
        for layer in self.deep:
            at = f"v.deepstack.{layer}."
            shapes |= with_biases({at + "fc1": (joined, joined), at + "fc2": (self.output, joined)})
            shapes |= {f"{at}norm.weight": (joined,), f"{at}norm.bias": (joined,)}
        return shapes


def read_shape(file: TensorSource) -> Qwen3VlShape:
    """Returns the sizes of the tower from its metadata. Raises ModelError if one is missing or unsupported."""
    meta = file.metadata
    sizes = read_sizes(file)
    key = VISION + "is_deepstack_layers"
    is_deep = meta.require_bools(key, sizes["layers"]) if key in meta else []
    check_pixels(file, _HALF, _HALF)
    return Qwen3VlShape(
        **sizes,
        ffn=meta.require_int(VISION + "feed_forward_length", 1, 1 << 18),
        merge=meta.require_int(VISION + "spatial_merge_size", 1, 8),
        positions=position_side(file),
        deep=tuple(layer for layer, each in enumerate(is_deep) if each),
    )
