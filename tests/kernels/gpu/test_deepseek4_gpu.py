"""DeepSeek-V4 on the GPU engine, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.errors import ConfigError
from moeserve.kernels.stream_operands import KeyRings, KvLayer, StateLayer
from moeserve.kv.layout import KvLayout
from moeserve.kv.slot_kinds import spare_bytes
from moeserve.kv.states import StateCache
from moeserve.models.blocks.gpu.state_slots import StateSlots
from moeserve.models.errors import ModelError
from moeserve.models.gpu_features import check_gpu_features
from moeserve.models.loading.gpu_compressed import load_by_token
from moeserve.models.open import open_model
from moeserve.models.ranks.rank_share import why_undivided
from moeserve.models.registry import read_checked_shape
from tests.conftest import family_models
from tests.kernels.engines.model_engine import Fixture, distance
from tests.kernels.gpu.gpu_logits import load, logits_of
from tests.support.models.deepseek4_model import logits, new_model, write_model
from tests.support.router.plan_command import run

FIXTURES = family_models("deepseek4")


@pytest.mark.slow  # two minutes of CPU time under the interpreter
@pytest.mark.parametrize("model", FIXTURES, ids=lambda model: model.stem)
def test_no_further_from_the_truth_than_llama_cpp(model: Path) -> None:
    """See test_deepseek4.py for what a mistake costs. In chunks whose products take floats; under the interpreter the
    first of the longest text, whose rows choose entries from position 67 on."""
    fixture, runner = Fixture.load(model, model.parent), load(model)
    most = 512 if DEVICE == "cuda" else 90
    tokens, truth = fixture.tokens[-1][:most], fixture.truth[-1][:most]
    kl, agrees = distance(truth, logits_of(runner, 0, tokens, 33))
    print(f"median KL {kl.median():.2e}, top-1 {agrees.double().mean():.1%}")
    assert kl.median() <= fixture.llama_cpp["median_kl"]
    assert agrees.double().mean() >= fixture.llama_cpp["top1_agreement"] - 0.01


@pytest.mark.slow  # a minute of CPU time under the interpreter
def test_chunks_beside_transformers(tmp_path: Path) -> None:
    """Entries are chosen from position 35 on, and chunks are longer than the ring has room for."""
    model, tokens = new_model(8), [(37 * i * i + 11 * i) % 600 for i in range(44)]
    runner = load(write_model(model, tmp_path / "m.gguf", Type.F16))
    truth = logits(model, tokens)
    for slot, chunk in enumerate((18, 44)):
        kl, agrees = distance(truth, logits_of(runner, slot, tokens, chunk))
        print(f"chunks of {chunk}: median KL {kl.median():.2e}, top-1 {agrees.double().mean():.1%}")
        assert kl.median() < 1e-5
        assert agrees.double().mean() > 0.9


def test_a_state_s_window_moves_with_it() -> None:
    keys, states = torch.arange(8 + 3 * 4).half().view(-1, 1, 1).repeat(1, 1, 2), torch.arange(6.0).view(3, 2)
    layer = KvLayer(keys, keys, rings=KeyRings(8, 4, 3))
    slots = StateSlots([StateLayer(states, 0)], [layer])
    slots.copy([(2, 0), (-1, 1)])
    assert states.tolist() == [[4, 5], [0, 0], [4, 5]]
    assert keys[:, 0, 0].tolist() == [*range(8), *range(16, 20), *range(12, 16), *range(16, 20)]


def test_layers_of_windows_alone_keep_states_of_no_values(tmp_path: Path) -> None:
    """As the first ones do in RAM, beside a GPU: their rings are found by state slot."""
    shape = read_checked_shape(open_model(write_model(new_model(8), tmp_path / "m.gguf", Type.F16)))
    (layer,) = StateCache(KvLayout(shape), 2, range(1)).layers
    assert layer.states.shape == (2, 0)


def test_an_expert_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """A kernel would read beside the router's logits."""
    model = new_model(8)
    model.state_dict()["model.layers.0.mlp.gate.tid2eid"][17, 1] = 99
    source = open_model(write_model(model, tmp_path / "m.gguf", Type.F16))
    moe = read_checked_shape(source).layers[0].moe
    assert moe is not None
    with pytest.raises(ModelError, match=r"ffn_gate_tid2eid.*names expert 99; there are 8"):
        load_by_token(source, moe, 0, torch.device("cpu"))


def test_what_a_gpu_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    path = write_model(new_model(8), tmp_path / "m.gguf", Type.F16)
    source = open_model(path)
    shape = read_checked_shape(source)
    check_gpu_features(source, shape)
    assert "a residual of several streams" in why_undivided(shape, 2)
    drafts = '{"method": "ngram", "num_speculative_tokens": 4}'
    with pytest.raises(ConfigError, match="no drafts for models with compressed"):
        load(path, speculative_config=drafts)
    with pytest.raises(ConfigError, match="no RAM tier for models with compressed"):
        load(path, kv_ram=1)


def test_the_plan_counts_spare_slots_and_a_steps_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_model(new_model(8), tmp_path / "m.gguf", Type.F16)
    shown = run(capsys, "--model", str(path), "--device", "cuda", "--gpu-memory", "8")
    memory, layout = shown["memory"], KvLayout(read_checked_shape(open_model(path)))
    usual = run(capsys, "--model", str(path), "--device", "cuda", "--gpu-memory", "8", "--max-num-seqs", "1")[
        "memory"
    ]
    assert memory["ram_tier"] == 0
    assert memory["gpu_states"] % layout.state_bytes() == 0
    assert memory["gpu_other"] - usual["gpu_other"] >= spare_bytes(layout, 64) - spare_bytes(layout, 1)
