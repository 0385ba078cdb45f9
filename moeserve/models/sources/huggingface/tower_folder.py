"""The vision tower of a folder in Hugging Face's layout, under the keys and tensor names of an `mmproj` GGUF."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.gguf import Metadata, TensorInfo
from moeserve.models.sources.gguf.metadata import MetadataValue
from moeserve.models.sources.json_files import read_json
from moeserve.models.sources.weight_files import weight_files

from .folder import CONFIG, read_config
from .made_tensor import MadeTensor, values_made
from .safetensors_file import StoredTensor, read_tensors, release_pages
from .towers import gemma3, gemma4, glm4v, kimi_k25, llama_4, minimax_m3, qwen3vl
from .towers.family import Config, Made, TowerFamily

VISION_CONFIG: Final = "vision_config"
_PROCESSORS: Final = ("preprocessor_config.json", "processor_config.json")
_IMAGES: Final = ("image_processor", "media_proc_cfg")  # keys under which some have the pixels' settings
# Types of towers that do not identify the tower: Kimi's, and MiniMax's, which is CLIP's. The model's type is used
# instead.
_UNNAMED: Final = ("", "None", "clip_vision_model")
_FAMILIES: Final = (
    qwen3vl.FAMILY,
    gemma3.FAMILY,
    gemma4.FAMILY,
    kimi_k25.FAMILY,
    glm4v.FAMILY,
    minimax_m3.FAMILY,
    llama_4.FAMILY,
)


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
        """Returns the tensor's bytes in GGUF's form, uint8: see TensorSource.data."""
        return self._made[name].make()

    def advise_done(self, name: str) -> None:
        """See TensorSource."""
        for source in self._made[name].sources:
            release_pages(source)


def has_tower(folder: Path) -> bool:
    """Returns whether config.json has settings of a vision tower. Raises ModelError if it is missing or damaged."""
    return isinstance(read_config(folder).get(VISION_CONFIG), dict)


def open_tower_folder(path: Path) -> TowerFolder:
    """Opens and returns the vision tower of a model's folder. The tensors' shapes are not checked. Raises ModelError
    for a folder without a tower, or with one that is not supported."""
    config = read_config(path)
    vision = config.get(VISION_CONFIG)
    if not isinstance(vision, dict):
        raise ModelError(
            path / CONFIG, f"has no {VISION_CONFIG!r}: this model has no vision tower; leave --mmproj out"
        )
    kind = str(vision.get("model_type"))
    if kind in _UNNAMED:
        kind = str(config.get("model_type"))
    family = next((each for each in _FAMILIES if kind.startswith(each.model_types)), None)
    if family is None:
        supported = ", ".join(each.name for each in _FAMILIES)
        raise SettingError(
            path / CONFIG, f"its vision tower is a {kind!r}; supported are towers of {supported}"
        )
    for key, value in family.fixed.items():
        if vision.get(key, value) != value:
            raise SettingError(
                path / CONFIG, f"{VISION_CONFIG}.{key} is {vision[key]!r}; only {value!r} is supported"
            )
    metadata = Metadata(path / CONFIG, _values(path, config, vision, family), _complain(family))
    return TowerFolder(path, metadata, dict(_tensors(path, family, vision)))


def _values(path: Path, config: Config, vision: Config, family: TowerFamily) -> dict[str, MetadataValue]:
    """Returns the metadata that an mmproj file's header would have."""
    values: dict[str, MetadataValue] = {
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": family.projector,
    }
    for key, names in family.keys.items():
        value = next((vision[name] for name in names if name in vision), None)
        if isinstance(value, int | float):
            values[f"clip.vision.{key}"] = value
    values |= family.derived(config, vision)
    for key, number in zip(("image_mean", "image_std"), _pixels(path, family), strict=True):
        values[f"clip.vision.{key}"] = np.array(number, np.float32)
    return values


def _pixels(path: Path, family: TowerFamily) -> tuple[Sequence[float], Sequence[float]]:
    """Returns the mean and the deviation of pixels, by channel: the processor's values, else the family's."""
    mean, deviation = map(list, family.pixels)
    for name in _PROCESSORS:
        if not (path / name).exists():
            continue
        whole = read_json(path / name)
        key = next((key for key in _IMAGES if key in whole), None)
        found = whole if key is None else whole[key]
        if not isinstance(found, dict):
            raise ModelError(path / name, f"{key!r} is not an object; download it again")
        if found.get("do_normalize", True) is False:
            return [0.0] * 3, [1.0] * 3
        lists = found.get("image_mean", mean), found.get("image_std", deviation)
        if not all(
            isinstance(each, list) and len(each) == 3 and all(isinstance(x, int | float) for x in each)
            for each in lists
        ):
            raise SettingError(path / name, "image_mean and image_std are not lists of three numbers")
        return lists
    return mean, deviation


def _complain(family: TowerFamily) -> Callable[[Path, str, str], ModelError]:
    """Makes errors that use config.json's names."""

    def complain(path: Path, key: str, problem: str) -> ModelError:
        theirs = family.keys.get(key.removeprefix("clip.vision."))
        return SettingError(path, f"{VISION_CONFIG + '.' + theirs[0] if theirs else key} {problem}")

    return complain


def _tensors(path: Path, family: TowerFamily, vision: Config) -> Made:
    """Yields the tower's tensors under the names of an mmproj file. Raises ModelError for a tensor that is not one of
    the tower's."""
    for file in weight_files(path):
        for name, tensor in read_tensors(file)[1].items():
            prefix = next((each for each in family.prefixes if name.startswith(each)), None)
            is_whole = prefix is None or prefix in family.whole_names
            theirs = name if is_whole else name.removeprefix(prefix or "")
            if prefix is not None and theirs not in family.skipped:
                found = list(_made(theirs, tensor, family, vision))
                if not found:
                    raise SettingError(path, f"tensor {name!r} has no place in a vision tower of this kind")
                yield from found


def _made(
    name: str, tensor: StoredTensor, family: TowerFamily, vision: Config
) -> Iterator[tuple[str, MadeTensor]]:
    made = list(family.made(name, tensor, vision))
    if made:
        yield from made
    elif (known := _named(name, family)) is not None:
        yield known, values_made(tensor, tensor.shape or (1,), lambda v: v)


def _named(name: str, family: TowerFamily) -> str | None:
    """Returns GGUF's name; None without one."""
    match = family.layer.fullmatch(name)
    names = family.names if match is None else family.layer_names
    at, rest = ("", name) if match is None else (f"v.blk.{match[1]}.", match[2])
    if rest in names:
        return at + names[rest]
    module, _, part = rest.rpartition(".")
    module = module.removesuffix(".linear")  # Gemma's products are modules around one
    return f"{at}{names[module]}.{part}" if module in names else None
