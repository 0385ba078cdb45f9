"""What an `mmproj` GGUF says of its tower: the shape, and how large a picture may be. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import GGUFFile, open_gguf
from moeserve.visualserver.picture_size import SizeRule

PROJECTOR: Final = "qwen3vl_merger"
# The file has no bounds of a picture's size; llama.cpp assumes these for the projector.
DEFAULT_MIN_TOKENS: Final = 8
DEFAULT_MAX_TOKENS: Final = 4096
MOST_TOKENS: Final = 16384

_PREFIX: Final = "clip.vision."
_HALF: Final = 0.5  # mean and deviation of the pixels, of each channel


@dataclass(frozen=True, slots=True)
class TowerShape:
    """Qwen3-VL's tower: https://arxiv.org/abs/2511.21631."""

    hidden: int
    heads: int
    layers: int
    ffn: int
    patch: int  # pixels a side
    merge: int  # patches a side of what becomes one token
    output: int  # the text model's hidden size
    positions: int  # a side of the learned table, in patches

    @property
    def token_side(self) -> int:
        """Pixels."""
        return self.patch * self.merge

    def size_rule(self, min_tokens: int | None, max_tokens: int | None) -> SizeRule:
        """The sizes of pictures of `min_tokens` to `max_tokens` tokens; None: the projector's default."""
        most = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
        least = min(DEFAULT_MIN_TOKENS, most) if min_tokens is None else min_tokens
        area = self.token_side**2
        return SizeRule(self.token_side, least * area, most * area)


def open_tower(path: Path) -> tuple[GGUFFile, TowerShape]:
    """The file and its shape. Raises ModelError for what is no tower, or one that is not supported."""
    file = open_gguf(path)
    meta = file.metadata
    if file.architecture != "clip":
        raise ModelError(
            path, f"its architecture is {file.architecture!r}, not 'clip'; name the model's mmproj file"
        )
    if not meta.require_bool("clip.has_vision_encoder", False):
        raise ModelError(
            path, "has no vision encoder (clip.has_vision_encoder); name the model's mmproj file"
        )
    # Files with several encoders name the projector of each.
    key = _PREFIX + "projector_type"
    projector = meta.require_str(key if key in meta else "clip.projector_type")
    if projector != PROJECTOR:
        raise ModelError(path, f"has the projector {projector!r}; {PROJECTOR!r} alone is supported")
    layers = meta.require_int(_PREFIX + "block_count", 1, 512)
    deep = _PREFIX + "is_deepstack_layers"
    if deep in meta and any(meta.require_bools(deep, layers)):
        raise ModelError(
            path,
            "adds to the first layers (DeepStack), which is not supported; leave --mmproj out",
        )
    for name in ("image_mean", "image_std"):
        if any(value != _HALF for value in meta.require_floats(_PREFIX + name, 3)):
            raise meta.error(_PREFIX + name, f"is not {_HALF} for each channel")
    hidden = meta.require_int(_PREFIX + "embedding_length", 4, 1 << 16)
    heads = meta.require_int(_PREFIX + "attention.head_count", 1, 1024)
    if hidden % (4 * heads):
        raise ModelError(path, f"{heads} heads of {hidden} dimensions cannot rotate; convert it again")
    shape = TowerShape(
        hidden=hidden,
        heads=heads,
        layers=layers,
        ffn=meta.require_int(_PREFIX + "feed_forward_length", 1, 1 << 18),
        patch=meta.require_int(_PREFIX + "patch_size", 1, 64),
        merge=meta.require_int(_PREFIX + "spatial_merge_size", 1, 8),
        output=meta.require_int(_PREFIX + "projection_dim", 1, 1 << 16),
        positions=_position_side(file),
    )
    _check_tensors(file, shape)
    return file, shape


def _position_side(file: GGUFFile) -> int:
    table = file.tensors.get("v.position_embd.weight")
    side = 0 if table is None or len(table.shape) != 2 else round(table.shape[0] ** 0.5)
    if table is None or side < 1 or side * side != table.shape[0]:
        raise ModelError(
            file.path, "v.position_embd.weight is no square table of positions; convert it again"
        )
    return side


def tensor_shapes(shape: TowerShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of a tower by name, row-major."""
    h, joined = shape.hidden, shape.hidden * shape.merge**2
    patch = (h, 3, shape.patch, shape.patch)
    shapes: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": patch,
        "v.patch_embd.weight.1": patch,
        "v.patch_embd.bias": (h,),
        "v.position_embd.weight": (shape.positions**2, h),
        "v.post_ln.weight": (h,),
        "v.post_ln.bias": (h,),
        "mm.0.weight": (joined, joined),
        "mm.0.bias": (joined,),
        "mm.2.weight": (shape.output, joined),
        "mm.2.bias": (shape.output,),
    }
    products = {
        "attn_qkv": (3 * h, h),
        "attn_out": (h, h),
        "ffn_up": (shape.ffn, h),
        "ffn_down": (h, shape.ffn),
    }
    for layer in range(shape.layers):
        at = f"v.blk.{layer}."
        for name, (rows, columns) in products.items():
            shapes |= {f"{at}{name}.weight": (rows, columns), f"{at}{name}.bias": (rows,)}
        for name in ("ln1", "ln2"):
            shapes |= {f"{at}{name}.weight": (h,), f"{at}{name}.bias": (h,)}
    return shapes


def _check_tensors(file: GGUFFile, shape: TowerShape) -> None:
    for name, expected in tensor_shapes(shape).items():
        tensor = file.tensors.get(name)
        if tensor is None:
            raise ModelError(file.path, f"tensor {name} is missing; download or convert it again")
        if tensor.shape != expected:
            raise ModelError(
                file.path,
                f"tensor {name} has shape {tensor.shape}, not {expected}; convert it again",
            )
