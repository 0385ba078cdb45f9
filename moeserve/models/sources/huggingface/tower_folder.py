"""The vision tower of a folder in Hugging Face's layout, under the keys and tensor names of an `mmproj` GGUF."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import ModelError
from moeserve.models.sources.gguf import Metadata, TensorInfo
from moeserve.models.sources.gguf.metadata import MetadataValue

from .folder import CONFIG, read_config, weight_files
from .json_files import read_json
from .layer_settings import DEEP_LAYERS
from .made_tensor import MadeTensor, values_made
from .safetensors_file import StoredTensor, read_tensors
from .wrapped_text import TEXT_CONFIG

VISION_CONFIG: Final = "vision_config"
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")  # the second has it under a key
_IMAGES: Final = "image_processor"


@dataclass(frozen=True, slots=True)
class _Family:
    model_types: tuple[str, ...]  # how vision_config's begins
    projector: str
    keys: Mapping[str, str]  # clip.vision.KEY -> vision_config's
    fixed: Mapping[str, Any]  # settings that the tower's code has no other value for, where they are given
    prefixes: tuple[str, ...]
    names: Mapping[str, str]  # tensor or module -> ours
    layer: re.Pattern[str]  # its number and the rest
    layer_names: Mapping[str, str]
    pixels: tuple[float, float]  # mean and deviation without a processor's file


_QWEN: Final = _Family(
    model_types=("qwen3_vl", "qwen3_5"),
    projector="qwen3vl_merger",
    keys={
        "block_count": "depth",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_heads",
        "patch_size": "patch_size",
        "spatial_merge_size": "spatial_merge_size",
        "projection_dim": "out_hidden_size",
    },
    fixed={"temporal_patch_size": 2, "in_channels": 3, "hidden_act": "gelu_pytorch_tanh"},
    prefixes=("model.visual.", "visual."),
    names={
        "patch_embed.proj.bias": "v.patch_embd.bias",
        "pos_embed.weight": "v.position_embd.weight",
        "merger.norm": "v.post_ln",
        "merger.linear_fc1": "mm.0",
        "merger.linear_fc2": "mm.2",
    },
    layer=re.compile(r"blocks\.(\d{1,3})\.(.*)"),
    layer_names={
        "norm1": "ln1",
        "norm2": "ln2",
        "attn.qkv": "attn_qkv",
        "attn.proj": "attn_out",
        "mlp.linear_fc1": "ffn_up",
        "mlp.linear_fc2": "ffn_down",
    },
    pixels=(0.5, 0.5),
)
_GEMMA4: Final = _Family(
    model_types=("gemma4_vision",),
    projector="gemma4v",
    keys={
        "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads",
        "attention.layer_norm_epsilon": "rms_norm_eps",
        "patch_size": "patch_size",
        "projector.scale_factor": "pooling_kernel_size",
    },
    fixed={"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False},
    prefixes=("model.vision_tower.", "vision_tower.", "model.embed_vision.", "embed_vision."),
    names={
        "patch_embedder.position_embedding_table": "v.position_embd.weight",
        "embedding_projection": "mm.input_projection",
        "std_bias": "v.std_bias",
        "std_scale": "v.std_scale",
    },
    layer=re.compile(r"encoder\.layers\.(\d{1,3})\.(.*)"),
    layer_names={
        "input_layernorm": "ln1",
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "ln2",
        "post_feedforward_layernorm": "ffn_post_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_out",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    },
    pixels=(0.0, 1.0),
)
_FAMILIES: Final = (_QWEN, _GEMMA4)
_QWEN_PATCH: Final = "patch_embed.proj.weight"  # [hidden, channel, time, row, column]
_GEMMA_PATCH: Final = "patch_embedder.input_proj.weight"  # [hidden, row x column x channel]
_DEEP: Final = re.compile(r"deepstack_merger_list\.(\d{1,3})\.(norm|linear_fc1|linear_fc2)\.(.*)")
_DEEP_NAMES: Final = {"norm": "norm", "linear_fc1": "fc1", "linear_fc2": "fc2"}


class TowerFolder:
    """A TensorSource of the tower alone. The mappings last as long as this object or any array from `data`."""

    architecture = "clip"

    def __init__(self, path: Path, metadata: Metadata, made: Mapping[str, MadeTensor]) -> None:
        self.path = path
        self.metadata = metadata
        self.tensors = {
            name: TensorInfo(
                name, each.shape, each.type, prod(each.shape[:-1]) * each.type.row_bytes(each.shape[-1])
            )
            for name, each in made.items()
        }
        self._made = made

    def data(self, name: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """See TensorSource."""
        return self._made[name].make()


def has_tower(folder: Path) -> bool:
    """Returns whether config.json speaks of a vision tower. Raises ModelError."""
    return isinstance(read_config(folder).get(VISION_CONFIG), dict)


def open_tower_folder(path: Path) -> TowerFolder:
    """Opens the tower of a model's folder. The tensors' shapes are not checked. Raises ModelError."""
    config = read_config(path)
    vision = config.get(VISION_CONFIG)
    if not isinstance(vision, dict):
        raise ModelError(path / CONFIG, f"has no {VISION_CONFIG!r}: this model has no vision tower")
    kind = str(vision.get("model_type"))
    family = next((each for each in _FAMILIES if kind.startswith(each.model_types)), None)
    if family is None:
        raise ModelError(
            path / CONFIG,
            f"its vision tower is a {kind!r}; towers of Qwen3-VL, Qwen3.5, Qwen3.6 and Gemma 4 are supported",
        )
    for key, value in family.fixed.items():
        if vision.get(key, value) != value:
            raise ModelError(
                path / CONFIG, f"{VISION_CONFIG}.{key} is {vision[key]!r}; {value!r} is supported"
            )
    metadata = Metadata(path / CONFIG, _values(path, config, vision, family), _complain(family))
    deep = vision.get(DEEP_LAYERS) or []
    return TowerFolder(path, metadata, dict(_tensors(path, family, deep)))


def _values(
    path: Path, config: Mapping[str, Any], vision: Mapping[str, Any], family: _Family
) -> dict[str, MetadataValue]:
    """Returns what an mmproj file's header would have."""
    values: dict[str, MetadataValue] = {
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": family.projector,
    }
    given = {f"clip.vision.{key}": vision[theirs] for key, theirs in family.keys.items() if theirs in vision}
    values |= {key: value for key, value in given.items() if isinstance(value, int | float)}
    text = config.get(TEXT_CONFIG)
    if family is _GEMMA4 and isinstance(text, dict) and isinstance(text.get("hidden_size"), int):
        values["clip.vision.projection_dim"] = text["hidden_size"]
    deep = vision.get(DEEP_LAYERS)
    depth = values.get("clip.vision.block_count")
    if isinstance(deep, list) and deep and isinstance(depth, int) and 0 < depth <= 512:
        values["clip.vision.is_deepstack_layers"] = np.isin(np.arange(depth), deep)
    for key, number in zip(("image_mean", "image_std"), _pixels(path, family), strict=True):
        values[f"clip.vision.{key}"] = np.array(number, np.float32)
    return values


def _pixels(path: Path, family: _Family) -> tuple[list[float], list[float]]:
    """Returns the mean and the deviation of pixels, by channel: the processor's, else the family's."""
    mean, deviation = ([each] * 3 for each in family.pixels)
    for name in _PROCESSORS:
        if not (path / name).exists():
            continue
        found = read_json(path / name)
        found = found.get(_IMAGES, found)
        if not isinstance(found, dict):
            raise ModelError(path / name, f"{_IMAGES!r} is no object; download it again")
        if found.get("do_normalize", True) is False:
            return [0.0] * 3, [1.0] * 3
        lists = found.get("image_mean", mean), found.get("image_std", deviation)
        if not all(
            isinstance(each, list) and len(each) == 3 and all(isinstance(x, int | float) for x in each)
            for each in lists
        ):
            raise ModelError(path / name, "image_mean and image_std are no lists of three numbers")
        return lists
    return mean, deviation


def _complain(family: _Family) -> Callable[[Path, str, str], ModelError]:
    """Makes errors that use config.json's names."""

    def complain(path: Path, key: str, problem: str) -> ModelError:
        theirs = family.keys.get(key.removeprefix("clip.vision."))
        return ModelError(path, f"{VISION_CONFIG + '.' + theirs if theirs else key} {problem}")

    return complain


def _tensors(path: Path, family: _Family, deep: list[int]) -> Iterator[tuple[str, MadeTensor]]:
    """Yields the tower's tensors under our names. Raises ModelError for one that has no place in it."""
    for file in weight_files(path):
        for name, tensor in read_tensors(file)[1].items():
            prefix = next((each for each in family.prefixes if name.startswith(each)), None)
            if prefix is not None:
                found = list(_made(name.removeprefix(prefix), tensor, family, deep))
                if not found:
                    raise ModelError(path, f"tensor {name!r} has no place in a vision tower of this kind")
                yield from found


def _made(
    name: str, tensor: StoredTensor, family: _Family, deep: list[int]
) -> Iterator[tuple[str, MadeTensor]]:
    shape = tensor.shape
    if name == _QWEN_PATCH and len(shape) == 5 and shape[2] == 2:
        yield "v.patch_embd.weight", values_made(tensor, (*shape[:2], *shape[3:]), lambda v: v[:, :, 0])
        yield "v.patch_embd.weight.1", values_made(tensor, (*shape[:2], *shape[3:]), lambda v: v[:, :, 1])
    elif name == _GEMMA_PATCH and len(shape) == 2 and (side := _patch_side(shape[1])):
        split, ours = (shape[0], side, side, 3), (shape[0], 3, side, side)
        yield (
            "v.patch_embd.weight",
            values_made(tensor, ours, lambda v: v.reshape(split).transpose(0, 3, 1, 2)),
        )
    elif (known := _named(name, family, deep)) is not None:
        yield known, values_made(tensor, shape or (1,), lambda v: v)


def _patch_side(numbers: int) -> int:
    """Returns the side of a square patch of three channels in pixels; 0 if there is none."""
    side = round((numbers / 3) ** 0.5)
    return side if 3 * side * side == numbers else 0


def _named(name: str, family: _Family, deep: list[int]) -> str | None:
    """Returns GGUF's name; None without one."""
    if (match := _DEEP.fullmatch(name)) and int(match[1]) < len(deep):
        return f"v.deepstack.{deep[int(match[1])]}.{_DEEP_NAMES[match[2]]}.{match[3]}"
    match = family.layer.fullmatch(name)
    names = family.names if match is None else family.layer_names
    at, rest = ("", name) if match is None else (f"v.blk.{match[1]}.", match[2])
    if rest in names:
        return at + names[rest]
    module, _, part = rest.rpartition(".")
    module = module.removesuffix(".linear")  # Gemma's products are modules around one
    return f"{at}{names[module]}.{part}" if module in names else None
