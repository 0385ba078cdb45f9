"""Next-token blocks of Hugging Face folders: what torch computes of them, and what the same weights do in a GGUF."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from moeserve.models.errors import ModelError
from moeserve.models.next_token import with_next_token_block
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from moeserve.models.skipped_layers import SkippedLayers, skipped_layers
from moeserve.models.sources.gguf import names as n
from moeserve.models.tensors import model_tensors
from moeserve.worker.loading import drafting
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.gpu.driver import Driver
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.weights import nmse
from tests.support.models.folder_as_gguf import write_gguf
from tests.support.models.next_token_folder import COHERE, NextTokenFolder
from tests.support.worker.foreseen_drafts import ANSWER, asked
from tests.support.worker.served_answers import load, lose_at, serve
from tests.worker.drafts.next_token_rows import Drafting

NEXT = {"num_nextn_predict_layers": 1}
CENTERED = {"rms_norm_eps": None, "layer_norm_eps": 2**-10}
FOLDERS: dict[str, dict[str, Any]] = {
    "qwen3_next": {},
    "qwen3_5_moe_text": {},
    "qwen3_5_text": {},
    "glm4_moe": NEXT,
    "hy_v3": NEXT,
    "deepseek_v3": NEXT,
    "glm4_moe_lite": NEXT,
    "bailing_hybrid": NEXT,
    # Blocks with windows (of 16 and 17 tokens) and without experts, like the first layer.
    # Positions and all keys: here no layer has both and experts. With LayerNorm besides.
    "cohere2_moe": COHERE,
    "exaone_moe": {"like": 0, "mtp_layer_types": ["sliding_attention"]},
    "mimo_v2_flash": {"like": 0, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "step3p7": NEXT
    | {
        "like": 0,
        "before_norm": True,
        "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "swiglu_limits_shared": [None, None, None, 0.5],
    },
}


def _mimos_norm(name: str) -> str:
    """llama.cpp's converter names MiMo's last norm so."""
    return name.replace(n.NEXTN_HEAD_NORM, n.LAYER_OUTPUT_NORM)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [*FOLDERS.items(), ("cohere2_moe", COHERE | CENTERED)],
    ids=[*FOLDERS, "cohere2_moe, LayerNorm"],
)
def test_what_torch_computes(
    model_type: str, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = NextTokenFolder(tmp_path, model_type, **settings)
    truth = folder.truth(TOKENS[:40], monkeypatch)
    drafting = Drafting(folder.path, TOKENS[:40])
    logits = torch.stack([drafting.logits(row) for row in range(1, 40)])
    assert nmse(logits, truth) < 3e-7
    assert torch.equal(logits.argmax(-1), truth.argmax(-1))
    write_gguf(
        folder.path, tmp_path / "same.gguf", named=_mimos_norm if model_type == "mimo_v2_flash" else str
    )
    from_gguf = Drafting(tmp_path / "same.gguf", TOKENS[:40])
    assert torch.equal(torch.stack([from_gguf.logits(row) for row in range(1, 40)]), logits)


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_5_moe_text", "deepseek_v3", "bailing_hybrid", "cohere2_moe", "mimo_v2_flash", "step3p7"],
)
def test_its_drafts_leave_the_text_as_it_is(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafting, "least_probability", lambda _config: 0.0)
    folder = NextTokenFolder(tmp_path, model_type, **FOLDERS[model_type])
    plain = build_cpu_runner(load(folder.path))
    requests = asked(3, plain.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    mtp = load(folder.path, speculative_config='{"method": "auto", "num_speculative_tokens": 3}')
    found, report = serve(build_cpu_runner(mtp), requests, 3, lose_at(6))
    assert found == expected
    assert report.draft_tokens > ANSWER


@pytest.mark.parametrize("model_type", ["qwen3_next", "glm4_moe"])
def test_without_drafts_it_is_skipped(model_type: str, tmp_path: Path) -> None:
    """As a GGUF's: the trunk alone is loaded, and all of the block's bytes are told."""
    folder = NextTokenFolder(tmp_path, model_type, **FOLDERS[model_type])
    source = open_folder(folder.path)
    shape = read_checked_shape(source)
    assert (shape.num_layers, shape.num_skipped_layers) == (folder.layers, 1)
    assert not any(n.layer_of(name) == folder.layers for name in model_tensors(shape))
    stored = sum(tensor.numel() * 4 for tensor in folder.tensors.values())
    assert skipped_layers(shape, source) == SkippedLayers(1, num_bytes=stored)


@pytest.mark.parametrize(
    ("model_type", "lost"),
    [("qwen3_next", "mtp.norm.weight"), ("glm4_moe", "mlp.gate.weight"), ("glm4_moe", "eh_proj.weight")],
)
def test_without_a_part_it_is_skipped_and_drafts_are_refused(
    model_type: str, lost: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If it was asked for by name; else there is a warning."""
    folder = NextTokenFolder(tmp_path, model_type, **FOLDERS[model_type])
    kept = {name: value for name, value in folder.tensors.items() if not name.endswith(lost)}
    assert len(kept) == len(folder.tensors) - 1
    save_file(kept, folder.path / "model-mtp.safetensors")
    source = open_folder(folder.path)
    shape = read_checked_shape(source)
    missing = r"tensor 'blk\.\d\.[a-z_.]+' is missing"
    with pytest.raises(ModelError, match=missing):
        with_next_token_block(shape, source)
    with pytest.raises(ModelError, match=missing):
        load(folder.path, speculative_config='{"method": "mtp", "num_speculative_tokens": 3}')
    loaded = load(folder.path, speculative_config='{"method": "auto", "num_speculative_tokens": 3}')
    (warning,) = [one.getMessage() for one in caplog.records if one.name == "moeserve.worker.loading.ready"]
    assert re.search(f"no drafts by the model's next-token block .*{missing}", warning)
    runner = build_cpu_runner(loaded)
    assert len(Driver(runner).generate(0, [1, 2, 3], 2)) == 2
