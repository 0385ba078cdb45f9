"""Folders of Gemma 4, published and transformers' own, beside transformers' model of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from moeserve.tokenizer import TextTokenizer
from tests.kernels.folders.folder_variants import assert_is_near_transformers, edit_config
from tests.support.models.gemma_tokens import CONTROLS, CORPUS, TEXTS, USER_DEFINED, theirs
from tests.support.models.hugging_face_model import write_family, write_published_gemma
from tests.support.models.hugging_face_settings import VOCAB_ROWS

SLIDING, FULL = "sliding_attention", "full_attention"
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "rope_theta": 1e5, "partial_rotary_factor": 0.5},
}
# As in 31B, and as in E2B: the last layers use the keys of earlier ones, in feed-forwards of twice the width.
DENSE: dict[str, Any] = {"enable_moe_block": False}
SMALL: dict[str, Any] = DENSE | {
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": VOCAB_ROWS,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_k_eq_v": False},
        {"layer_types": [FULL, SLIDING, FULL]},
        {"layer_types": [SLIDING] * 3},  # transformers lets the last see all
        {"layer_types": [FULL] * 3},
        {"layer_types": None, "num_hidden_layers": 7},
        {"rope_parameters": ROPES},
        {"rope_parameters": ROPES | {FULL: {"rope_type": "default", "rope_theta": 1e5}}},
        {"rms_norm_eps": 1e-3, "final_logit_softcapping": 5.0},
        {"tie_word_embeddings": False},
        DENSE,
        SMALL,
        SMALL | {"use_double_wide_mlp": False, "num_kv_shared_layers": 0},
    ],
    ids=str,
)
def test_settings_mean_what_transformers_makes_of_them(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_family(tmp_path / "tiny", "gemma4_text", **changes)
    assert_is_near_transformers(tmp_path / "tiny", model, monkeypatch)


def test_a_gemma_as_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With vision, which is left out."""
    model = write_published_gemma(tmp_path / "tiny")
    assert "per_layer_config" not in (tmp_path / "tiny" / "config.json").read_text()
    assert_is_near_transformers(tmp_path / "tiny", model, monkeypatch)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma") / "tiny"
    write_family(folder, "gemma4_text")
    return folder


def linked(folder: Path, to: Path) -> Path:
    """A copy whose small files may be changed."""
    to.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            (to / file.name).symlink_to(file)
        else:
            (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"enable_moe_block": False}, "router"),
        ({"hidden_size_per_layer_input": 256}, "per_layer_token_embd.weight' is missing"),
        ({"num_kv_shared_layers": 3}, "'num_kv_shared_layers' is 3; only fewer than 3"),
        ({"num_kv_shared_layers": 1}, "none of which has the same window"),
        ({"num_experts": None}, "'num_experts' is missing"),
        ({"use_bidirectional_attention": "all"}, "'use_bidirectional_attention' is 'all'"),
        ({"hidden_activation": "silu"}, "'hidden_activation' is 'silu'"),
        ({"final_logit_softcapping": None}, "'final_logit_softcapping' is missing"),
        ({"layer_types": [FULL]}, "of each layer is expected"),
        ({"layer_types": [FULL, "x", FULL]}, "of each layer is expected"),
        ({"num_hidden_layers": "x"}, "'num_hidden_layers' is 'x'"),
        ({"attention_k_eq_v": False}, "attn_v.weight' is missing"),
        ({"per_layer_config": 5}, "'per_layer_config' is 5"),
        ({"per_layer_config": {"9": {"head_dim": 64}}}, "'per_layer_config'"),
        ({"per_layer_config": {"2": {"sliding_window": 8}}}, "'per_layer_config'"),
        ({"per_layer_config": {"1": {"head_dim": 64}}}, "heads of several widths"),
        ({"head_dim": None}, "'head_dim' is missing|'head_dim' or"),
        ({"rope_parameters": {FULL: ROPES[FULL]}}, f"an object for each of {SLIDING} and {FULL}"),
        ({"rope_parameters": ROPES | {SLIDING: ROPES[FULL]}}, f"rope_type 'proportional' of {SLIDING}"),
        ({"rope_parameters": ROPES | {FULL: ROPES[FULL] | {"factor": 8}}}, "'factor' of rope_type"),
        ({"rope_parameters": ROPES | {FULL: ROPES[FULL] | {"beta": 8}}}, "'beta' of rope_type"),
        ({"rope_parameters": ROPES | {FULL: {"rope_type": "default"}}}, f"'rope_theta' of {FULL} is missing"),
        (
            {"rope_parameters": ROPES | {FULL: ROPES[FULL] | {"partial_rotary_factor": 2}}},
            "'partial_rotary_factor' is 2",
        ),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused(
    changes: dict[str, Any], message: str, written: Path, tmp_path: Path
) -> None:
    folder = linked(written, tmp_path / "copy")
    edit_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        read_checked_shape(open_folder(folder))


@pytest.fixture
def spaced(written: Path, tmp_path: Path) -> Path:
    """With a tokenizer of Gemma's kind, written by transformers."""
    from transformers import GemmaTokenizer

    folder = linked(written, tmp_path / "copy")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (folder / file).unlink(missing_ok=True)
    model = json.loads(theirs().to_str())["model"]
    tokenizer = GemmaTokenizer(
        model["vocab"],
        [tuple(merge) for merge in model["merges"]],
        unk_token="<pad>",
        mask_token="<pad>",
        additional_special_tokens=[*CONTROLS[3:], *USER_DEFINED],
    )
    tokenizer.save_pretrained(folder)
    edit_config(folder, eos_token_id=model["vocab"]["<eos>"])
    return folder


def test_ids_are_those_of_transformers(spaced: Path) -> None:
    from transformers import GemmaTokenizer

    ours = TextTokenizer.from_gguf(open_folder(spaced))
    reference = GemmaTokenizer.from_pretrained(spaced)
    for text in (*TEXTS, *CORPUS[:3]):
        ids = ours.encode(text)
        assert ids == reference.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special=False) == text
    vocabulary = ours.vocabulary
    assert vocabulary.add_bos
    ends = {ours.encode(text)[0] for text in ("<eos>", "<turn|>", "<|tool_response>")}
    assert set(vocabulary.eos_ids) == ends
    # Special in tokenizer.json, but to be seen by whoever reads calls.
    assert ours.decode(ours.encode("<|tool_call>x")) == "<|tool_call>x"
    assert vocabulary.unused == set(
        range(Tokenizer.from_file(str(spaced / "tokenizer.json")).get_vocab_size(), VOCAB_ROWS)
    )


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("model", {"byte_fallback": False}, "'model' has byte_fallback False"),
        ("model", {"type": "Unigram"}, "'model' has type 'Unigram'"),
        ("pre_tokenizer", {"type": "Whitespace"}, "pre_tokenizer"),
        ("normalizer", {"type": "Replace", "pattern": {"String": "x"}, "content": "y"}, "byte-level BPE"),
    ],
)
def test_other_tokenizers_are_refused(part: str, value: dict[str, Any], message: str, spaced: Path) -> None:
    path = spaced / "tokenizer.json"
    content = json.loads(path.read_text())
    content[part] = content[part] | value if part == "model" else value
    path.write_text(json.dumps(content))
    with pytest.raises(ModelError, match=message):
        open_folder(spaced)
