"""GLM-5.3-Flash on the CPU engine, beside transformers' model of the same weights: other seeds, types and settings than
the fixture's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kv.cache_pages import CachePages, Move, kv_tensors
from moeserve.kv.host_blocks import HostPage
from moeserve.kv.layout import KvLayout
from moeserve.models.errors import ModelError
from moeserve.models.gpu_features import check_gpu_features, gpu_shape
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.models.tensors import check_tensors
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import STATE_SLOT, Engine, distance
from tests.kernels.operations import COSTLY_ISAS, ISAS, stream_of
from tests.support.models.glm5next_model import (
    DENSE_UP_TO,
    INDEX_DIM,
    LAYERS,
    RANK,
    logits,
    new_model,
    write_model,
)

TOKENS = [(37 * i * i + 11 * i) % 600 for i in range(100)]


@pytest.fixture(scope="module")
def model() -> Any:
    return new_model(8)


@pytest.fixture(scope="module")
def path(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(model, tmp_path_factory.mktemp("glm5next") / "m.gguf", Type.F16)


def assert_near(truth: torch.Tensor, found: torch.Tensor) -> None:
    """Beyond the positions that attend to all, a near tie of the choice changes a row and some of those after it."""
    kl, agrees = distance(truth, found)
    assert kl[:DENSE_UP_TO].max() < 1e-6
    assert kl.median() < 1e-5
    assert agrees.double().mean() > 0.9


@pytest.mark.parametrize("isa", COSTLY_ISAS)
def test_near_to_transformers(model: Any, path: Path, isa: str) -> None:
    assert_near(logits(model, TOKENS), Engine(stream_of(isa), path).logits(TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"linear_lower_bound": None},
        {"index_kpool": 4, "index_topk": 32},
        {"mlp_layer_types": ["dense", "dense", "sparse", "sparse"], "hc_mult": 2, "hc_sinkhorn_iters": 3},
    ],
    ids=str,
)
def test_other_settings(settings: dict[str, Any], tmp_path: Path) -> None:
    model = new_model(9, **settings)
    engine = Engine(stream_of(ISAS[-1]), write_model(model, tmp_path / "m.gguf", Type.F16))
    assert_near(logits(model, TOKENS), engine.logits(TOKENS))


@pytest.mark.slow
def test_eight_bits(tmp_path: Path) -> None:
    """llama.cpp was not run on this model. Attending to all keys, say, is further away."""
    model = new_model(8)
    engine = Engine(stream_of(ISAS[-1]), write_model(model, tmp_path / "m.gguf", Type.Q8_0))
    kl, _ = distance(logits(model, TOKENS), engine.logits(TOKENS))
    assert kl.median() < 2e-2


def test_files_of_its_earlier_name(model: Any, path: Path, tmp_path: Path) -> None:
    """As they are published: with a next-token block, which is skipped, and arrays that count it."""
    kv_heads = [0, 0, 1, 1, 1]
    earlier = write_model(
        model, tmp_path / "m.gguf", Type.F16, architecture="glm5next", block_count=LAYERS + 1, nextn_predict_layers=1,
        attention__head_count_kv=kv_heads, attention__indexer__types=[True] * 5,
        swiglu_clamp_exp=[1.5] * 5, swiglu_clamp_shexp=[1.5] * 5, expert_shared_feed_forward_length=32,
    )  # fmt: skip
    found, expected = (Engine(stream_of(ISAS[-1]), each).logits(TOKENS) for each in (earlier, path))
    assert torch.equal(found, expected)


def test_chunks_and_threads_do_not_change_a_bit(path: Path) -> None:
    engine, other = Engine(stream_of(ISAS[-1]), path), Engine(stream_of(ISAS[-1], 3), path)
    whole = engine.logits(TOKENS)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(TOKENS, chunk), whole)


def test_a_worker_gives_a_row_the_same_bits_alone_and_in_a_crowd(path: Path) -> None:
    config = small_config(path, device="cpu", threads=2, max_num_seqs=4, max_model_len=256)
    runner = load_cpu_runner(config, lambda *_: None)
    whole = Driver(runner).score(0, TOKENS, len(TOKENS))
    for chunk in (7, 33):
        assert Driver(runner).score(1, TOKENS, chunk) == whole
    expected = Engine(stream_of(ISAS[-1]), path).logits(TOKENS).double().log_softmax(-1)
    assert [entry.logprob for entry in whole[: len(TOKENS) - 1]] == pytest.approx(
        [expected[i, token].item() for i, token in enumerate(TOKENS[1:])], abs=1e-4
    )


@pytest.mark.parametrize("first", [64, 65, 71])  # a block's end, one key, and all but one
def test_a_prefix_comes_back_with_its_pages_and_its_state(path: Path, first: int) -> None:
    """Pages hold latent vectors, index keys and what those of a block in progress are made of; the state is that of
    Kimi Delta Attention. Without either, others."""
    engine = Engine(stream_of(ISAS[-1]), path)
    whole = engine.logits(TOKENS)
    engine.logits(TOKENS[:first])
    states = engine.model._states[0].states
    kept = states[STATE_SLOT].clone()
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(len(TOKENS))).int()[:first].numpy()
    engine.logits(TOKENS)
    pages = CachePages(kv_tensors(engine.model._kv), len(slots))
    page = HostPage([torch.empty(pages.page_bytes, dtype=torch.uint8)], [0])
    pages.out([Move(slots, page)])
    engine.model.forget(slots.tolist())

    def rest(*, with_state: bool) -> torch.Tensor:
        engine.model.copy_states(torch.tensor([[-1, STATE_SLOT]], dtype=torch.int32))
        engine.stream.wait()
        if with_state:
            states[STATE_SLOT] = kept
        return engine.logits(TOKENS, start=first, clears=False)

    assert not torch.equal(rest(with_state=True), whole[first:])
    pages.into([Move(slots, page)], pages.mark())
    assert torch.equal(rest(with_state=True), whole[first:])
    assert not torch.equal(rest(with_state=False), whole[first:])


def test_the_bytes_of_a_token_and_of_a_state(path: Path) -> None:
    layout = KvLayout(read_checked_shape(open_gguf(path)))
    attends = 2 * (RANK + 2 * INDEX_DIM)  # a latent vector, an index key, and a gate
    assert [layout.layer_bytes(layer) for layer in range(LAYERS)] == [0, 0, attends, attends]
    state = 2 * 32 * 32 + 2 * 3 * 64  # of two heads, and the convolution's last two inputs
    assert [layout.state_values(layer) for layer in range(LAYERS)] == [state, state, 0, 0]


def test_a_gpu_leaves_the_indexer_out_of_short_contexts(path: Path) -> None:
    """Its tensors are in the file, and no unknown ones."""
    source = open_gguf(path)
    shape = read_checked_shape(source)
    check_gpu_features(source, shape)
    short = gpu_shape(shape, DENSE_UP_TO)
    assert (short.indexer, short.context_length) == (None, DENSE_UP_TO)
    check_tensors(short, source)
    assert gpu_shape(shape, DENSE_UP_TO + 1) is shape


def test_the_indexer_chooses(model: Any, path: Path, tmp_path: Path) -> None:
    """With a number to choose that no context reaches, other logits; up to it, the same."""
    every = write_model(model, tmp_path / "all.gguf", Type.F16, attention__indexer__top_k=4096)
    chosen, found = (Engine(stream_of(ISAS[-1]), each).logits(TOKENS) for each in (path, every))
    assert torch.equal(chosen[:DENSE_UP_TO], found[:DENSE_UP_TO])
    assert not torch.equal(chosen[DENSE_UP_TO:], found[DENSE_UP_TO:])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention__head_count_kv": [0, 0, 0, 0]}, "has no attention layer"),
        ({"kda__gate_lower_bound": 1.0}, "gate_lower_bound"),
        ({"kda__gate_lower_bound": None}, "gate_lower_bound' is missing"),
        ({"rope__dimension_count": 32}, "rope.dimension_count"),
        ({"attention__indexer__kpool": 1}, "is 1; 2 to 4096"),
        ({"attention__indexer__top_k": 7}, "is 7; 8 to"),
        ({"attention__indexer__top_k": 12}, "whole blocks of 8 keys"),
        ({"attention__indexer__kpool": 12}, "indexer_compressor_ape"),
        ({"attention__indexer__kpool_select_tail": False}, "kpool_select_tail"),
        ({"attention__indexer__types": [True, True, True, False]}, "gives layer 3 no indexer"),
        ({"attention__indexer__key_length": 16}, "is 16; 32 to 1024"),
        ({"hyper_connection__count": 1}, "is 1; 2 to 16"),
        ({"hyper_connection__sinkhorn_iterations": 0}, "is 0; 1 to 1024"),
        ({"attention__q_lora_rank": 0}, "is 0; 1 to"),
        ({"attention__kv_lora_rank": 64}, "attention.key_length"),
    ],
    ids=str,
)
def test_files_that_would_be_computed_wrongly(
    model: Any, tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=said):
        read_checked_shape(open_gguf(write_model(model, tmp_path / "m.gguf", Type.F16, **changes)))
