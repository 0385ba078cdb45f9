"""Llama 4's tower (https://ai.meta.com/blog/llama-4-multimodal-intelligence/), which reads square tiles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from moeserve.errors import ConfigError
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.huggingface.towers.llama_4 import PROJECTOR as _PROJECTOR
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import TileRule
from moeserve.visualserver.shapes.layer_norm_sizes import LayerNormSizes
from moeserve.visualserver.shapes.shape import (
    VISION,
    PixelScale,
    matrix_rows,
    read_pixel_scale,
    read_sizes,
)

PROJECTOR: Final = _PROJECTOR
MOST_TILES: Final = 16  # in addition to the whole picture's tile, in the publisher's processor


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape(LayerNormSizes):
    """See `TowerShape`."""

    tile: int  # pixels a side
    adapter: tuple[int, int]  # widths of the network between the layers and the last product
    eps: float  # of LayerNorms
    pixels: PixelScale

    is_joined: ClassVar = False

    @property
    def tile_tokens(self) -> int:
        return (self.tile // self.token_side) ** 2

    @property
    def default_max_tokens(self) -> int:
        return (MOST_TILES + 1) * self.tile_tokens

    def patches(self, tokens: int) -> int:
        """See `TowerShape`: a tile's, as tiles are encoded one at a time."""
        return (self.tile // self.patch) ** 2 + 1

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> TileRule:
        if min_tokens is not None:
            raise ConfigError(
                "--image-min-tokens: Llama 4 divides each picture into tiles and never enlarges it; leave it out"
            )
        most = self.default_max_tokens if max_tokens is None else max_tokens
        if most < self.tile_tokens:
            raise ConfigError(
                f"--image-max-tokens: a tile of Llama 4 has {self.tile_tokens} tokens; raise the limit to at least that"
            )
        return TileRule(self.token_side, self.tile, max(1, min(MOST_TILES, most // self.tile_tokens - 1)))

    def fits(self, text: ModelShape) -> bool:
        return text.architecture == PROJECTOR  # both have this name

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        h, (wide, narrow) = self.hidden, self.adapter
        return {
            "v.patch_embd.weight": (h, 3 * self.patch**2),
            "v.class_embd": (h,),
            "v.position_embd.weight": ((self.tile // self.patch) ** 2 + 1, h),
            "mm.model.mlp.1.weight": (wide, h * self.merge**2),
            "mm.model.mlp.2.weight": (narrow, wide),
            "mm.model.fc.weight": (self.output, narrow),
            **self.norm_shapes("v.pre_ln", "v.post_ln"),
            **self.layer_shapes(),
        }


def read_shape(file: TensorSource) -> LlamaShape:
    """Returns the sizes of the tower from its metadata. Raises ModelError if one is missing or unsupported."""
    meta = file.metadata
    sizes = read_sizes(file)
    merge = meta.require_int(VISION + "projector.scale_factor", 1, 8)
    tile = meta.require_int(VISION + "image_size", 1, 2048)
    token_side = sizes["patch"] * merge
    if tile % token_side:
        raise ModelError(
            file.path, f"tiles of {tile} pixels do not hold whole tokens of {token_side}; convert it again"
        )
    return LlamaShape(
        **sizes,
        ffn=meta.require_int(VISION + "feed_forward_length", 1, 1 << 18),
        merge=merge,
        tile=tile,
        adapter=(matrix_rows(file, "mm.model.mlp.1.weight"), matrix_rows(file, "mm.model.mlp.2.weight")),
        eps=meta.require_float(VISION + "attention.layer_norm_epsilon", 1e-12, 1e-2),
        pixels=read_pixel_scale(file),
    )
