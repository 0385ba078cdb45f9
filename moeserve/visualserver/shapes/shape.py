"""The interface of a tower's shape, for the visual server and the memory plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypedDict

from moeserve.models.errors import ModelError
from moeserve.models.interface import ModelShape
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.picture_size import FrameRule, SizeRule, StretchRule

VISION = "clip.vision."
BLOCK: Final = (
    128  # numbers that share a scale in block floating point, and columns that are packed together: 32
)
PANEL: Final = 32
# Tables whose rows are looked up; they are not matrices of products.
_TABLES: Final = ("v.position_embd.weight",)


@dataclass(frozen=True, slots=True)
class PixelScale:
    """The input of a tower: (pixel - mean) / deviation, by channel, for pixels from 0 to 1."""

    mean: tuple[float, ...]
    deviation: tuple[float, ...]


class TowerShape(Protocol):
    """The sizes and properties of a vision tower, which determine its buffers and results. Immutable."""

    @property
    def hidden(self) -> int:
        """Width of a patch's row."""
        ...

    @property
    def layers(self) -> int: ...

    @property
    def patch(self) -> int:
        """Side of a patch, in pixels."""
        ...

    @property
    def embedding_size(self) -> int:
        """Width of a token's row: see `ModelShape.embedding_size`."""
        ...

    @property
    def default_max_tokens(self) -> int:
        """The most tokens of a picture without --image-max-tokens."""
        ...

    @property
    def token_side(self) -> int:
        """Pixels a side of the square that becomes one token."""
        ...

    @property
    def token_floats(self) -> int:
        """Floats of GPU memory per token while a picture is encoded."""
        ...

    def patches(self, tokens: int) -> int:
        """Returns how many patches of a picture of `tokens` tokens are encoded together."""
        ...

    def patch_floats(self, *, is_block_float: bool) -> int:
        """Returns the floats of RAM per patch while a picture is encoded on the CPU, at the most. is_block_float:
        products and attention compute in block floating point."""
        ...

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> SizeRule:
        """Returns the rule for pictures of `min_tokens` to `max_tokens` tokens; None stands for the projector's
        default. Raises ConfigError for a bound that the projector does not support."""
        ...

    def frame_rule(self, max_tokens: int) -> FrameRule | None:
        """Returns the rule for videos of at most `max_tokens` tokens; None if the tower reads no videos."""
        ...

    def fits(self, text: ModelShape) -> bool:
        """Returns whether the tower is for models of this architecture."""
        ...

    def tensor_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the row-major shape of every tensor that the tower must have, by name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerSizes:
    """The sizes that all towers have: the base of the shapes. See `TowerShape`."""

    hidden: int
    heads: int
    layers: int
    patch: int  # pixels a side
    merge: int  # patches a side of the square that becomes one token
    output: int  # the text model's hidden size

    @property
    def token_side(self) -> int:
        return self.patch * self.merge

    @property
    def embedding_size(self) -> int:
        return self.output

    def patches(self, tokens: int) -> int:
        return tokens * self.merge**2

    def frame_rule(self, max_tokens: int) -> FrameRule | None:
        return None

    @property
    def patch_pixels(self) -> int:
        """Numbers of a patch's pixels."""
        return 3 * self.patch**2

    def most_floats(self, *stages: int) -> int:
        """Returns `TowerShape.patch_floats` for a tower with these needs of its stages: the largest of them or of the
        pixels' conversion to patches, beside the rotations' angles."""
        return max(*stages, 3 * self.patch_pixels) + self.hidden // self.heads


class FileSizes(TypedDict):
    """The fields of `TowerSizes` that all files have under the same keys."""

    hidden: int
    heads: int
    layers: int
    patch: int
    output: int


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Returns whether a tensor is a matrix of products."""
    return len(shape) == 2 and name not in _TABLES


def packed_matrix_bytes(rows: int, columns: int) -> int:
    """Returns the bytes of a matrix in block floating point (kernels/csrc/ops/block_float.h)."""
    panels = -(-rows // PANEL)
    return panels * PANEL * (2 * (columns + columns % 2) + 4 * -(-columns // BLOCK))


def input_floats(width: int, *, is_block_float: bool) -> int:
    """Returns the size, in float32 numbers, of a row of `width` numbers after conversion to block floating
    point for a product: codes of 16 bits and scales. 0 if products take float32."""
    return -(-width // BLOCK) * (BLOCK // 2 + 1) if is_block_float else 0


def attention_code_floats(hidden: int, heads: int, *, is_block_float: bool) -> int:
    """Returns the floats per patch of the codes and scales of keys and values."""
    width = -(-hidden // heads // 16) * 16
    return heads * (hidden // heads + width + 2 + width // 32) // 2 if is_block_float else 0


def axial_attention_floats(hidden: int) -> int:
    """Returns the floats per patch of an `AxialTower`'s attention: x, its norm, q, k and v, and these once more as
    attention takes them."""
    return 8 * hidden


def perceptron_floats(hidden: int, ffn: int, *, is_block_float: bool) -> int:
    """Returns the floats per patch of x += down(gelu(up(norm(x)))): x, and gelu's input and output; or x, down's input,
    its codes and the result."""
    codes = input_floats(ffn, is_block_float=is_block_float)
    return max(hidden + 2 * ffn, 2 * hidden + ffn + codes)


def read_sizes(file: TensorSource, parts: int = 4, least_head: int = 1) -> FileSizes:
    """Returns the sizes that all towers have (widths in numbers, patch side in pixels), from the file's metadata. The
    width of a head is a multiple of `parts`, and at least `least_head`. Raises ModelError if a size is missing or
    unsupported."""
    meta = file.metadata
    hidden = meta.require_int(VISION + "embedding_length", 4, 1 << 16)
    heads = meta.require_int(VISION + "attention.head_count", 1, 1024)
    if hidden % (parts * heads) or hidden // heads < least_head:
        raise ModelError(
            file.path,
            f"{hidden} dimensions do not divide into {heads} heads of a supported width; convert it again",
        )
    return {
        "hidden": hidden,
        "heads": heads,
        "layers": meta.require_int(VISION + "block_count", 1, 512),
        "patch": meta.require_int(VISION + "patch_size", 1, 64),
        "output": meta.require_int(VISION + "projection_dim", 1, 1 << 16),
    }


def stretch_rule(
    token_side: int,
    given: tuple[int | None, int | None],
    default: tuple[int, int],
    *,
    enlarges_sides: bool = False,
) -> StretchRule:
    """Returns the rule for pictures of the given least and most tokens; None stands for the default. If the given most
    is below the default least, it replaces that least."""
    min_tokens, max_tokens = given
    most = default[1] if max_tokens is None else max_tokens
    least = min(default[0], most) if min_tokens is None else min_tokens
    area = token_side**2
    return StretchRule(token_side, least * area, most * area, enlarges_sides=enlarges_sides)


def check_tensors(file: TensorSource, shape: TowerShape) -> None:
    """Checks that the file has each of the tower's tensors in the shape that `shape` expects. Raises ModelError if one
    is missing or has another shape."""
    for name, expected in shape.tensor_shapes().items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelError(file.path, f"tensor {name} is missing; download or convert it again")
        if tensor.shape != expected:
            raise ModelError(
                file.path,
                f"tensor {name} has shape {tensor.shape}, not {expected}; convert it again",
            )


def check_pixels(file: TensorSource, mean: float, deviation: float) -> None:
    """Checks that the file scales pixels, whose values are 0 to 1, with this mean and deviation in each of the three
    channels. Raises ModelError if not."""
    for name, value in (("image_mean", mean), ("image_std", deviation)):
        key = VISION + name
        if any(each != value for each in file.metadata.require_floats(key, 3)):
            raise file.metadata.error(key, f"is not {value:g} for each channel")


def read_pixel_scale(file: TensorSource) -> PixelScale:
    """Returns the mean and the deviation of each of the three channels, with which pixels (0 to 1) are scaled. Raises
    ModelError if the file does not state them, or with numbers out of range."""
    mean, deviation = (file.metadata.require_floats(VISION + name, 3) for name in ("image_mean", "image_std"))
    if not all(0.0 <= each <= 1.0 for each in mean):
        raise file.metadata.error(VISION + "image_mean", "is not within 0 and 1 for each channel")
    if not all(1e-3 <= each <= 1e3 for each in deviation):
        raise file.metadata.error(VISION + "image_std", "is not within 0.001 and 1000 for each channel")
    return PixelScale(tuple(map(float, mean)), tuple(map(float, deviation)))


def position_side(file: TensorSource) -> int:
    """Returns the side, in patches, of the square table of learned positions. Raises ModelError if it is missing or not
    square."""
    table = file.tensors.get("v.position_embd.weight")
    side = 0 if table is None or len(table.shape) != 2 else round(table.shape[0] ** 0.5)
    if table is None or side < 1 or side * side != table.shape[0]:
        raise ModelError(
            file.path, "v.position_embd.weight is not a square table of positions; convert it again"
        )
    return side


def matrix_rows(file: TensorSource, name: str) -> int:
    """Returns the number of rows of the matrix named `name`. Raises ModelError if the tensor is missing or not a
    matrix."""
    tensor = file.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        raise ModelError(file.path, f"{name} is not a matrix; convert it again")
    return tensor.shape[0]
