"""SigLIP, the tower of Gemma 3 (https://arxiv.org/abs/2503.19786), which reads squares of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from moeserve.errors import ConfigError
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import SquareRule
from moeserve.visualserver.shapes.layer_norm_sizes import LayerNormSizes
from moeserve.visualserver.shapes.shape import (
    VISION,
    PixelScale,
    read_pixel_scale,
    read_sizes,
)

PROJECTOR: Final = "gemma3"
POOLED: Final = 4  # patches a side of one token, if the file does not say
LEAST_SIDE: Final = 4  # tokens: of the picture that a tower encodes before it is ready
PROJECTION: Final = "mm.input_projection"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Shape(LayerNormSizes):
    """See `TowerShape`."""

    side: int  # pixels of a picture
    eps: float  # of all norms
    pixels: PixelScale
    is_swapped: bool  # the file calls the feed-forward's first product ffn_down and its second one ffn_up

    is_joined: ClassVar = False

    @property
    def up_and_down(self) -> tuple[str, str]:
        """See `LayerNormSizes`."""
        return ("ffn_down", "ffn_up") if self.is_swapped else ("ffn_up", "ffn_down")

    @property
    def default_max_tokens(self) -> int:
        return (self.side // self.token_side) ** 2

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> SquareRule:
        tokens = self.default_max_tokens
        if min_tokens is not None:
            raise ConfigError(
                f"--image-min-tokens: a picture of Gemma 3 always has {tokens} tokens; leave it out"
            )
        if max_tokens is not None and max_tokens < tokens:
            raise ConfigError(
                f"--image-max-tokens: a picture of Gemma 3 always has {tokens} tokens; raise the limit to at least that"
            )
        return SquareRule(self.token_side, self.side)

    def fits(self, text: ModelShape) -> bool:
        return text.architecture == PROJECTOR  # both have this name

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        h = self.hidden
        return {
            "v.patch_embd.weight": (h, 3, self.patch, self.patch),
            "v.patch_embd.bias": (h,),
            "v.position_embd.weight": ((self.side // self.patch) ** 2, h),
            f"{PROJECTION}.weight": (h, self.output),
            "mm.soft_emb_norm.weight": (h,),
            **self.norm_shapes("v.post_ln"),
            **self.layer_shapes(),
        }


def read_shape(file: TensorSource) -> Gemma3Shape:
    """Returns the sizes of the tower from its metadata. Raises ModelError if one is missing or unsupported."""
    meta = file.metadata
    sizes = read_sizes(file, parts=1)
    ffn = meta.require_int(VISION + "feed_forward_length", 1, 1 << 18)
    merge = meta.require_int(VISION + "projector.scale_factor", 1, 8, default=POOLED)
    side = meta.require_int(VISION + "image_size", 1, 4096)
    token_side = sizes["patch"] * merge
    if side % token_side or side < LEAST_SIDE * token_side:
        raise ModelError(
            file.path,
            f"pictures of {side} pixels do not hold {LEAST_SIDE} x {LEAST_SIDE} whole tokens of {token_side}; convert "
            "it again",
        )
    # https://github.com/ggml-org/llama.cpp/pull/13282: older converters' names.
    first = file.tensors.get("v.blk.0.ffn_down.weight")
    return Gemma3Shape(
        **sizes,
        ffn=ffn,
        merge=merge,
        side=side,
        eps=meta.require_float(VISION + "attention.layer_norm_epsilon", 1e-12, 1e-2),
        pixels=read_pixel_scale(file),
        is_swapped=first is not None and first.shape == (ffn, sizes["hidden"]) and ffn != sizes["hidden"],
    )
