"""Names the weight files of a folder in Hugging Face's form. The launcher asks, too, so NumPy is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from moeserve.models.errors import ModelError, SettingError
from moeserve.models.sources.json_files import read_json

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"


def weight_files(folder: Path) -> list[Path]:
    """Returns the files that the index names, else model.safetensors, else all safetensors files."""
    index = folder / INDEX
    if not index.exists():
        single = folder / SINGLE
        files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
        if not files:
            raise SettingError(folder, "the folder has a config.json, but no .gguf and no .safetensors file")
        return files
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(index, "has no weight_map; download it again")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise SettingError(index, f"names the file {name!r}; a .safetensors file beside it is expected")
    files = [folder / name for name in sorted(set(weight_map.values()))]
    there = {file.name for file in folder.iterdir()}  # a name may be longer than the system allows
    missing = [file.name for file in files if file.name not in there]
    if missing:
        raise ModelError(
            folder,
            f"{len(missing)} of {len(files)} weight files are missing, {missing[0]} first; download them",
        )
    return files
