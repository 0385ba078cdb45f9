"""MoonViT, the tower of Kimi-K2.5 (https://arxiv.org/abs/2602.02276), for still pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeserve.errors import ConfigError
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import PadRule
from moeserve.visualserver.shapes.layer_norm_sizes import LayerNormSizes, with_biases
from moeserve.visualserver.shapes.shape import (
    VISION,
    PixelScale,
    read_pixel_scale,
    read_sizes,
)

PROJECTOR: Final = "kimik25"
DEFAULT_MAX_TOKENS: Final = 4096  # the publisher's 16,384 patches
MOST_SIDE: Final = 512  # patches, in the publisher's processor
POSITIONS: Final = "v.position_embd.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiShape(LayerNormSizes):
    """See `TowerShape`."""

    positions: tuple[int, int]  # rows and columns of the learned table, in patches
    eps: float  # of LayerNorms
    pixels: PixelScale

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> PadRule:
        if min_tokens is not None:
            raise ConfigError(
                "--image-min-tokens: Kimi's pictures are shrunk to --image-max-tokens and never enlarged; leave it out"
            )
        most = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        return PadRule(self.token_side, self.patch, most * self.merge**2, MOST_SIDE)

    def fits(self, text: ModelShape) -> bool:
        return text.latent is not None

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        h, joined = self.hidden, self.hidden * self.merge**2
        return {
            "v.patch_embd.weight": (h, 3, self.patch, self.patch),
            "v.patch_embd.bias": (h,),
            POSITIONS: (*self.positions, h),
            **self.norm_shapes("v.post_ln", "mm.input_norm"),
            **with_biases({"mm.1": (joined, joined), "mm.2": (self.output, joined)}),
            **self.layer_shapes(),
        }


def read_shape(file: TensorSource) -> KimiShape:
    """Returns the sizes of the tower from its metadata. Raises ModelError if one is missing or unsupported."""
    meta = file.metadata
    table = file.tensors.get(POSITIONS)
    if table is None or len(table.shape) != 3:
        raise ModelError(
            file.path, f"{POSITIONS} is not a table of positions by row and column; convert it again"
        )
    return KimiShape(
        **read_sizes(file),
        ffn=meta.require_int(VISION + "feed_forward_length", 1, 1 << 18),
        merge=meta.require_int(VISION + "projector.scale_factor", 1, 8),
        positions=(table.shape[0], table.shape[1]),
        eps=meta.require_float(VISION + "attention.layer_norm_epsilon", 1e-12, 1e-2, default=1e-5),
        pixels=read_pixel_scale(file),
    )
