"""Hostile model files end in a clear error: what `python -m tests.fuzz.models` found, and bounds on what is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.models.errors import MAX_PROBLEM_CHARS, ModelError
from moeserve.models.open import open_model
from moeserve.models.registry import FAMILIES, read_checked_shape, read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer import TextTokenizer
from tests.fuzz.folder_mutations import base_files
from tests.fuzz.gguf_mutations import base_metadata, base_tensors
from tests.support.models.gguf_bytes import Tensor, gguf_bytes


def gguf(tmp_path: Path, **changes: object) -> Path:
    metadata = base_metadata() | {key.replace("__", "."): value for key, value in changes.items()}
    path = tmp_path / "m.gguf"
    tensors = base_tensors()
    path.write_bytes(gguf_bytes(metadata, tensors) + bytes((tensors[-1].offset or 0) + tensors[-1].nbytes))
    return path


HOSTILE = "\x1b[2J" + "x" * 1_000_000


def assert_short_and_no_terminals_command(error: ModelError, path: Path) -> None:
    assert len(str(error)) < len(str(path)) + MAX_PROBLEM_CHARS + 100
    assert "\x1b" not in str(error)


def test_an_error_is_short_and_no_terminals_command(tmp_path: Path) -> None:
    path = gguf(tmp_path, general__architecture=HOSTILE)
    with pytest.raises(
        ModelError, match=f"is not supported; supported are {', '.join(FAMILIES)}; choose"
    ) as caught:
        read_shape(open_model(path))
    assert_short_and_no_terminals_command(caught.value, path)
    assert "\n" not in str(ModelError(path, "a\nb"))


@pytest.mark.parametrize("model_type", [HOSTILE, [HOSTILE], {HOSTILE: 1}])
def test_so_is_one_of_a_folders_model_type(tmp_path: Path, model_type: object) -> None:
    config = base_files()["config.json"] | {"model_type": model_type}
    mappings = [f.hugging_face for f in FAMILIES.values() if f.hugging_face is not None]
    types = dict.fromkeys(name for mapping in mappings for name in mapping.model_types)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ModelError, match=f"is not supported; supported are {', '.join(types)}; choose"
    ) as caught:
        open_model(tmp_path)
    assert_short_and_no_terminals_command(caught.value, tmp_path / "config.json")


@pytest.mark.parametrize("factor", [10**400, "x", [1], 1e308 * 10])
def test_a_scale_of_yarn_that_is_no_usable_number(tmp_path: Path, factor: object) -> None:
    config = base_files()["config.json"]
    config["rope_parameters"]["attention_factor"] = factor
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text(json.dumps(base_files()["tokenizer.json"]))
    with pytest.raises(ModelError, match="attention_factor") as caught:
        open_model(tmp_path)
    assert_short_and_no_terminals_command(caught.value, tmp_path / "config.json")


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mistral", {"sliding_window": 4, "num_hidden_layers": True}),
        ("mistral", {"sliding_window": 4, "num_hidden_layers": 1 << 33}),  # 8 GiB of flags
        ("dots1", {"layer_types": True}),
        ("dots1", {"layer_types": 0.5}),
        ("glm4_moe", {"partial_rotary_factor": 0.5, "head_dim": 10**400}),
        ("glm4_moe", {"partial_rotary_factor": 0.5, "head_dim": -1}),
        ("bailing_hybrid", {"architectures": True}),
    ],
)
def test_a_setting_of_another_type(tmp_path: Path, model_type: str, changes: dict[str, object]) -> None:
    config = base_files()["config.json"] | {"model_type": model_type, "rope_parameters": None} | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        open_model(tmp_path)


def test_so_is_one_of_a_tensor_that_has_no_place(tmp_path: Path) -> None:
    name = "blk.0.\x1b[2J" + "x" * 50
    end = (base_tensors()[-1].offset or 0) + base_tensors()[-1].nbytes
    path = tmp_path / "m.gguf"
    tensors = [*base_tensors(), Tensor(name, (32,), offset=-(-end // 64) * 64)]
    path.write_bytes(gguf_bytes(base_metadata(), tensors) + bytes(end + 256))
    with pytest.raises(ModelError, match=r"has no place in architecture 'qwen3moe'; convert") as caught:
        read_checked_shape(open_model(path))
    assert_short_and_no_terminals_command(caught.value, path)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        # YaRN divides by its logarithm.
        (
            {"qwen3moe__rope__freq_base": 1.0, "qwen3moe__rope__scaling__type": "yarn"},
            "rope.freq_base.* is 1.0",
        ),
        ({"qwen3moe__expert_count": 4096, "qwen3moe__expert_used_count": 4096}, "1 to 128 is supported"),
    ],
)
def test_settings_that_would_fail_or_take_minutes_are_refused(
    tmp_path: Path, changes: dict[str, object], cause: str
) -> None:
    with pytest.raises(ModelError, match=cause):
        read_shape(open_model(gguf(tmp_path, **changes)))


def test_tokens_that_are_matched_whole_have_a_bound(tmp_path: Path) -> None:
    """100,000 took a minute."""
    metadata = base_metadata()
    tokens = [*metadata["tokenizer.ggml.tokens"], *(f"<|{i}|>" for i in range(5000))]
    kinds = [*metadata["tokenizer.ggml.token_type"], *[4] * 5000]
    path = gguf(tmp_path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=kinds)
    with pytest.raises(ModelError, match="4096 at most are supported"):
        TextTokenizer.from_gguf(open_model(path))


def test_strings_have_a_bound_in_all_arrays_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.models.sources.gguf.header.MAX_STRINGS", 1000)
    with pytest.raises(ModelError, match="1000 in all arrays together"):
        open_gguf(gguf(tmp_path, a=["x"] * 500, b=["y"] * 500))


@pytest.mark.parametrize("name", ["../model.safetensors", "x" * 300 + ".safetensors", "config.json"])
def test_an_index_names_files_beside_it(tmp_path: Path, name: str) -> None:
    for file, content in base_files().items():
        (tmp_path / file).write_text(json.dumps(content))
    (tmp_path / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{name}"}}}}')
    with pytest.raises(ModelError, match=r"beside it is expected|weight files are missing"):
        open_model(tmp_path)
