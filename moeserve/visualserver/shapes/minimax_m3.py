"""MiniMax-M3's tower (https://huggingface.co/MiniMaxAI/MiniMax-M3), for still pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import StretchRule
from moeserve.visualserver.shapes.layer_norm_sizes import LayerNormSizes, with_biases
from moeserve.visualserver.shapes.shape import (
    VISION,
    PixelScale,
    input_floats,
    matrix_rows,
    read_pixel_scale,
    read_sizes,
    stretch_rule,
)

PROJECTOR: Final = "minimax_m3"
DEFAULT_MIN_TOKENS: Final = 4  # the publisher's
DEFAULT_MAX_TOKENS: Final = 576  # the publisher's 451,584 pixels


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniMaxShape(LayerNormSizes):
    """See `TowerShape`."""

    inner: int  # inner width of the two networks behind the layers
    eps: float  # of LayerNorms
    pixels: PixelScale

    is_joined: ClassVar = False

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS

    @property
    def token_floats(self) -> int:
        network = self.merge**2 * (2 * self.inner + self.output + self.hidden)
        return max(self.layer_token_floats, network)

    def patch_floats(self, *, is_block_float: bool) -> int:
        """See `TowerShape`."""
        codes = input_floats(self.inner, is_block_float=is_block_float)
        # The first network behind the layers, which has a row for each patch.
        network = self.hidden + max(2 * self.inner, self.inner + codes + self.output)
        return self.most_floats(self.layer_floats(is_block_float=is_block_float), network)

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> StretchRule:
        default = (DEFAULT_MIN_TOKENS, DEFAULT_MAX_TOKENS)
        return stretch_rule(self.token_side, (min_tokens, max_tokens), default)

    def fits(self, text: ModelShape) -> bool:
        return text.architecture == "minimax-m3"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        h, patch = self.hidden, (self.hidden, 3, self.patch, self.patch)
        products = {
            "mm.1": (self.inner, h),
            "mm.2": (self.output, self.inner),
            "mm.merger.fc1": (self.inner, self.output * self.merge**2),
            "mm.merger.fc2": (self.output, self.inner),
        }
        return {
            "v.patch_embd.weight": patch,
            "v.patch_embd.weight.1": patch,
            **self.norm_shapes("v.pre_ln"),
            **with_biases(products),
            **self.layer_shapes(),
        }


def read_shape(file: TensorSource) -> MiniMaxShape:
    """Returns the sizes of the tower from its metadata. Raises ModelError if one is missing or unsupported."""
    meta = file.metadata
    return MiniMaxShape(
        **read_sizes(file, parts=2, least_head=6),
        ffn=meta.require_int(VISION + "feed_forward_length", 1, 1 << 18),
        merge=meta.require_int(VISION + "spatial_merge_size", 1, 8, default=2),
        inner=matrix_rows(file, "mm.1.weight"),
        eps=meta.require_float(VISION + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=1e-5),
        pixels=read_pixel_scale(file),
    )
