"""Gemma 4's tower (https://ai.google.dev/gemma/docs/core): the tower of 26B-A4B and 31B, and the smaller one of E2B and
E4B."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from moeserve.errors import ConfigError
from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import LargestRule
from moeserve.visualserver.shapes.shape import (
    VISION,
    TowerSizes,
    attention_code_floats,
    check_pixels,
    input_floats,
    read_sizes,
)

PROJECTOR: Final = "gemma4v"
DEFAULT_MAX_TOKENS: Final = 280  # transformers' `max_soft_tokens`; the file has none
POOLED: Final = 3  # patches a side of one token, if the file does not say

PRODUCTS: Final = ("attn_q", "attn_k", "attn_v", "attn_out", "ffn_gate", "ffn_up", "ffn_down")
# The bounds to which the inputs and outputs of a layer's products are clamped, in the towers of E2B and E4B.
BOUNDS: Final = ("input_min", "input_max", "output_min", "output_max")
# A vector that is subtracted from each token, and one by which the difference is multiplied, in the tower of 26B-A4B
# and 31B.
STANDARD: Final = ("v.std_bias", "v.std_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma4Shape(TowerSizes):
    """See `TowerShape`."""

    ffn: int
    positions: int  # rows of each learned table; one table is by column and one by row
    eps: float  # of RMS norms
    is_standardized: bool
    is_clamped: bool

    @property
    def default_max_tokens(self) -> int:
        return DEFAULT_MAX_TOKENS

    @property
    def token_floats(self) -> int:
        return self.merge**2 * (3 * self.ffn + 8 * self.hidden)

    def patch_floats(self, *, is_block_float: bool) -> int:
        """See `TowerShape`."""
        hidden = self.hidden
        codes = input_floats(hidden, is_block_float=is_block_float)
        # x, its norm, gate and up; clamped towers hold a product's result also before it is clamped.
        network = 2 * hidden + (3 * self.ffn if self.is_clamped else 2 * self.ffn + codes)
        # x, its norm, q, k and v, these once more by head, and the mixed values.
        attention = 9 * hidden + attention_code_floats(hidden, self.heads, is_block_float=is_block_float)
        return self.most_floats(attention, network)

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> LargestRule:
        if min_tokens is not None:
            raise ConfigError(
                "--image-min-tokens: Gemma 4's pictures are enlarged to as many tokens as --image-max-tokens allows; "
                "leave it out"
            )
        most = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        return LargestRule(self.token_side, most, min(most, self.positions // self.merge))

    def fits(self, text: ModelShape) -> bool:
        return text.architecture == "gemma4"

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        h, head = self.hidden, self.hidden // self.heads
        shapes: dict[str, tuple[int, ...]] = {
            "v.patch_embd.weight": (h, 3, self.patch, self.patch),
            "v.position_embd.weight": (2, self.positions, h),
            "mm.input_projection.weight": (self.output, h),
        }
        if self.is_standardized:
            shapes |= dict.fromkeys(STANDARD, (h,))
        widths = {"ffn_gate": (self.ffn, h), "ffn_up": (self.ffn, h), "ffn_down": (h, self.ffn)}
        for layer in range(self.layers):
            at = f"v.blk.{layer}."
            shapes |= {f"{at}{name}.weight": widths.get(name, (h, h)) for name in PRODUCTS}
            shapes |= {f"{at}{name}.weight": (head,) for name in ("attn_q_norm", "attn_k_norm")}
            for name in ("ln1", "ln2", "attn_post_norm", "ffn_post_norm"):
                shapes[f"{at}{name}.weight"] = (h,)
            if self.is_clamped:
                shapes |= {f"{at}{name}.{bound}": (1,) for name in PRODUCTS for bound in BOUNDS}
        return shapes


def read_shape(file: TensorSource) -> Gemma4Shape:
    """Returns the sizes of the tower from its metadata. Raises ModelError if one is missing or unsupported."""
    meta = file.metadata
    check_pixels(file, 0.0, 1.0)
    merge = meta.require_int(VISION + "projector.scale_factor", 1, 8, default=POOLED)
    return Gemma4Shape(
        **read_sizes(file),
        ffn=meta.require_int(VISION + "feed_forward_length", 1, 1 << 18),
        merge=merge,
        positions=_num_positions(file, merge),
        eps=meta.require_float(VISION + "attention.layer_norm_epsilon", 1e-12, 1e-2),
        is_standardized=any(name in file.tensors for name in STANDARD),
        is_clamped=any(f"v.blk.0.{name}.{bound}" in file.tensors for name in PRODUCTS for bound in BOUNDS),
    )


def _num_positions(file: TensorSource, merge: int) -> int:
    table = file.tensors.get("v.position_embd.weight")
    if table is None or len(table.shape) != 3 or table.shape[1] < merge:
        raise ModelError(
            file.path,
            "v.position_embd.weight is not a table of positions by column and row; convert it again",
        )
    return table.shape[1]
