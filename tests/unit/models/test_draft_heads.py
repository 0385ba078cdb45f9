"""Heads that draft for another model are refused by what they are, with what to use instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.models.errors import ModelError
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from moeserve.worker.loading.draft_model import open_draft_model
from tests.conftest import OWN_FIXTURES
from tests.fuzz.folder_mutations import base_files
from tests.support.models.gguf_bytes import Tensor, gguf_bytes


def head(path: Path, architecture: str) -> Path:
    """A file as llama.cpp's converter writes it, without a vocabulary; only what is read first."""
    path.write_bytes(gguf_bytes({"general.architecture": architecture, f"{architecture}.block_count": 1}, []))
    return path


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [("eagle3", "an EAGLE-3 head"), ("dflash", "a DFlash head"), ("some-assistant", "an assistant")],
)
def test_files(tmp_path: Path, architecture: str, kind: str) -> None:
    path = head(tmp_path / "head.gguf", architecture)
    refusal = rf"this is {kind} \({architecture}\), which drafts.* --speculative-model"
    with pytest.raises(ModelError, match=refusal):
        read_shape(open_model(path))
    config, model = (
        ServerConfig(speculative_model=str(path)),
        open_model(OWN_FIXTURES / "tiny-qwen3moe-q4_k_m.gguf"),
    )
    # An EAGLE-3 head is served beside its model: this one lacks all else.
    with pytest.raises(ModelError, match="key 'eagle3" if architecture == "eagle3" else refusal):
        open_draft_model(config, model, read_shape(model))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"},
        {"architectures": ["DFlashDraftModel"]},
        {"speculators_model_type": "eagle3"},
    ],
)
def test_folders(tmp_path: Path, changes: dict[str, object]) -> None:
    """Some say that they are of a family that is served."""
    (tmp_path / "config.json").write_text(json.dumps(base_files()["config.json"] | changes))
    with pytest.raises(ModelError, match=r"config\.json: this is .*, which drafts from another model's"):
        open_model(tmp_path)


def test_a_block_without_its_model(tmp_path: Path) -> None:
    """As unsloth publishes some (llama-cpp-turboquant#367)."""
    path = tmp_path / "mtp.gguf"
    metadata = {"general.architecture": "qwen35moe", "qwen35moe.block_count": 2}
    block = Tensor("blk.1.nextn.eh_proj.weight", (64, 32))
    path.write_bytes(gguf_bytes(metadata, [block]) + bytes(block.nbytes + 32))
    model = open_model(OWN_FIXTURES / "tiny-qwen3moe-q4_k_m.gguf")
    with pytest.raises(ModelError, match=r"next-token block \(MTP\), without the model.*\"method\": \"mtp\""):
        open_draft_model(ServerConfig(speculative_model=str(path)), model, read_shape(model))
