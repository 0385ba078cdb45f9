"""Layers whose attention and feed-forward read the same norm, which Cohere's models have, with both kinds of norm: the
folder beside transformers and the GGUF file, on the CPU and on a GPU (Triton's interpreter where there is none)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.models.errors import ModelError
from moeserve.models.open import open_folder, open_model
from moeserve.models.ranks.rank_share import why_undivided
from moeserve.models.registry import read_checked_shape
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import Engine
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.operations import COSTLY_ISAS, ISAS, stream_of
from tests.support.models.folder_as_gguf import write_gguf
from tests.support.models.newest_families import round_attended, write_newest

RMS: dict[str, Any] = {}
LAYER: dict[str, Any] = {"rms_norm_eps": None, "layer_norm_eps": 2**-10, "norm_topk_prob": True}
NORMS = {"RMSNorm": RMS, "LayerNorm": LAYER}
each_norm = pytest.mark.parametrize("norm", NORMS.values(), ids=list(NORMS))
FULL, SLIDING = "full_attention", "sliding_attention"


@each_norm
def test_a_folder_is_what_transformers_computes(
    norm: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_newest(tmp_path, "cohere2_moe", **norm).from_pretrained(tmp_path, dtype=torch.float32)
    round_attended(model, monkeypatch)
    with torch.no_grad():
        truth = model(torch.tensor([TOKENS])).logits[0]
    logits = Engine(stream_of(ISAS[0], threads=1), tmp_path).logits(TOKENS)
    assert (((logits - truth) ** 2).mean(-1) / (truth**2).mean()).median() < 1e-7
    assert (logits.argmax(-1) == truth.argmax(-1)).float().mean() > 0.95


@each_norm
def test_a_file_of_its_tensors_is_the_same_model(norm: dict[str, Any], tmp_path: Path) -> None:
    """With the keys that llama.cpp's converter writes: the architecture says which layers have positions."""
    write_newest(tmp_path, "cohere2_moe", **norm)
    write_gguf(tmp_path, tmp_path / "tiny.gguf")
    file = open_model(tmp_path / "tiny.gguf")
    assert file.architecture == "cohere2moe"
    assert read_checked_shape(file) == read_checked_shape(open_folder(tmp_path))
    stream = stream_of(ISAS[0], threads=1)
    assert torch.equal(
        Engine(stream, tmp_path / "tiny.gguf").logits(TOKENS), Engine(stream, tmp_path).logits(TOKENS)
    )


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@each_norm
def test_chunks_and_threads_do_not_change_a_bit(norm: dict[str, Any], isa: str, tmp_path: Path) -> None:
    write_newest(tmp_path, "cohere2_moe", **norm)
    whole = Engine(stream_of(isa), tmp_path).logits(TOKENS)
    other = Engine(stream_of(isa, 3), tmp_path)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(TOKENS, chunk), whole)


PLACEMENTS: dict[str, dict[str, int]] = {
    "all on the GPU": {},
    "half of the experts in RAM": {"num_gpu_experts": 4, "gpu_prefill_token_threshold": 1000},
    "two layers on the GPU": {"n_gpu_layers": 2, "num_gpu_experts": 2, "gpu_prefill_token_threshold": 1000},
}


@pytest.mark.slow  # a minute of CPU time each
@pytest.mark.parametrize("placement", PLACEMENTS)
@each_norm
def test_a_gpu_computes_the_same(norm: dict[str, Any], placement: str, tmp_path: Path) -> None:
    """Small steps round activations to int8, as experts in RAM do; larger ones keep floats, here of 32 bits."""
    write_newest(tmp_path, "cohere2_moe", num_hidden_layers=3, layer_types=[FULL, SLIDING, FULL],
                 mlp_layer_types=["dense", "sparse", "sparse"], **norm)  # fmt: skip
    truth = Engine(stream_of(ISAS[0], threads=1), tmp_path).logits(TOKENS).log_softmax(-1)
    sizes = {
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
        "max_model_len": 64,
        "max_total_tokens": 128,
        "threads": 1,
    }
    config = small_config(tmp_path, **(sizes | PLACEMENTS[placement]))
    runner = load_gpu_runner(config, open_model(tmp_path), lambda *_: None, torch.device(DEVICE), Start())
    for tokens, bound in ((5, 0.1), (20, 2e-3 if placement == "all on the GPU" else 0.1)):
        found = Driver(runner).score(0, TOKENS[:tokens], tokens)[: tokens - 1]
        errors = [
            abs(a.logprob - truth[i, token].item())
            for i, (a, token) in enumerate(zip(found, TOKENS[1:tokens], strict=True))
        ]
        assert torch.tensor(errors).median() < bound


def test_several_gpus_divide_it_by_layers_alone(tmp_path: Path) -> None:
    write_newest(tmp_path, "cohere2_moe")
    assert "beside each other" in why_undivided(read_checked_shape(open_folder(tmp_path)), 2)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_shared_experts": 1}, "'num_shared_experts' is 1"),
        ({"expert_selection_fn": "softmax"}, "'expert_selection_fn' is 'softmax'"),
        ({"mlp_layer_types": ["dense"]}, "'mlp_layer_types' is"),
        ({"attention_bias": True}, "'attention_bias' is True"),
    ],
    ids=str,
)
def test_settings_that_would_be_computed_wrongly_are_refused(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    write_newest(tmp_path, "cohere2_moe")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelError, match=said):
        open_folder(tmp_path)


def test_kinds_of_layers_without_lists_of_them(tmp_path: Path) -> None:
    """As transformers does: the layers behind the first ones count anew."""
    write_newest(tmp_path, "cohere2_moe")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for name in ("layer_types", "mlp_layer_types"):
        del config[name]
    own = {"first_k_dense_replace": 1, "sliding_window_pattern": 3, "prefix_dense_sliding_window_pattern": 1}
    path.write_text(json.dumps(config | own))
    layers = read_checked_shape(open_folder(tmp_path)).layers
    attentions = [layer.attention for layer in layers]
    assert [getattr(each, "window") for each in attentions] == [0, 16, 16, 0]  # noqa: B009
    assert [getattr(each, "has_positions") for each in attentions] == [True, True, True, False]  # noqa: B009
    assert [layer.moe is None for layer in layers] == [True, False, False, False]
