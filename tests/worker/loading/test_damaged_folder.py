"""Hugging Face folders whose files are missing, cut short or say what cannot be: each a clear error."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder, open_model
from moeserve.models.sources.huggingface import is_hugging_face_folder
from moeserve.tokenizer import TextTokenizer


def test_a_tower_beside_the_weights(folder: Path) -> None:
    """It makes the folder no folder of GGUF files, neither for the command line nor for who opens it."""
    for name in ("mmproj-F16.gguf", "imatrix.gguf"):
        (folder / name).write_bytes(b"")
    assert is_hugging_face_folder(folder)
    assert open_model(folder).architecture == "qwen3moe"
    config = resolve(ServerConfig(model=str(folder), mmproj="auto"))
    assert config.mmproj == str(folder / "mmproj-F16.gguf")
    assert config.served_model_name == folder.name
    (folder / "model-Q4_K_M.gguf").write_bytes(b"")
    assert not is_hugging_face_folder(folder)


def test_files_that_are_missing_or_no_json(folder: Path) -> None:
    for file, damage, cause in (
        ("generation_config.json", '{"eos_token_id": "x"}', "a token id below 4128, or a list"),
        ("generation_config.json", '{"eos_token_id": 4000000}', "a token id below 4128"),
        ("tokenizer_config.json", '{"eos_token": "<|nowhere|>"}', "not a token of tokenizer.json"),
        ("tokenizer_config.json", "[]", "not hold a JSON object"),
        ("tokenizer.json", None, "is missing; save the tokenizer"),
        ("config.json", "{", "not valid JSON"),
        ("config.json", "[" * 100_000, "not valid JSON"),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "../../x.safetensors"}}',
            "beside it is expected",
        ),
        (
            "model.safetensors.index.json",
            '{"weight_map": {"a": "x.safetensors"}}',
            "1 of 1 weight files are missing",
        ),
        ("model.safetensors.index.json", '{"weight_map": []}', "no weight_map"),
        ("model.safetensors.index.json", '{"weight_map": {"a": ["b"]}}', "beside it is expected"),
    ):
        before = (folder / file).read_text()
        if damage is None:
            (folder / file).unlink()
        else:
            (folder / file).write_text(damage)
        with pytest.raises(ModelError, match=cause):
            TextTokenizer.from_gguf(open_folder(folder))
        (folder / file).write_text(before)
    TextTokenizer.from_gguf(open_folder(folder))


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def write(file: Path, header: dict[str, Any], data: bytes) -> None:
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "damage", ["truncated", "empty", "huge header", "overlap", "outside", "no json", "fifo"]
)
def test_damaged_safetensors_are_refused(folder: Path, damage: str) -> None:
    file = min(folder.glob("*.safetensors"))
    header, data = header_of(file)
    header.pop("__metadata__", None)
    first, *_ = (name for name, entry in header.items() if entry["data_offsets"][0] == 0)
    if damage == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "empty":
        os.truncate(file, 0)
    elif damage == "huge header":
        file.write_bytes(struct.pack("<Q", 1 << 63) + file.read_bytes()[8:])
    elif damage == "overlap":
        write(file, header | {"x": header[first]}, data)
    elif damage == "outside":
        write(file, {first: header[first] | {"data_offsets": [0, 1 << 62]}}, data)
    elif damage == "no json":
        file.write_bytes(struct.pack("<Q", 8) + b"notjson!" + data)
    else:
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(ModelError, match=file.name):
        open_folder(folder)


def test_tensors_of_other_types_or_shapes_are_refused(folder: Path) -> None:
    expert = "model.layers.0.mlp.experts.1.up_proj.weight"
    file = next(f for f in folder.glob("*.safetensors") if expert in header_of(f)[0])
    tensors = load_file(file)
    for changed, cause in (
        (tensors[expert].to(torch.float8_e4m3fn), "F8_E4M3, without scales .* unscaled are F32, F16, BF16:"),
        (tensors[expert].float(), "expected to be alike"),
        (tensors[expert].T.contiguous(), "expected to be alike"),
    ):
        save_file(tensors | {expert: changed}, file)
        with pytest.raises(ModelError, match=cause):
            open_folder(folder)
