"""Families whose attention chooses keys. Up to as many keys as are chosen, all positions are near the truth; beyond,
rounding decides between nearly equal scores at some positions, so that the median is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moeserve.kernels.stream_operands import KvLayer
from moeserve.kv.cache_pages import CachePages, Move, kv_tensors
from moeserve.kv.host_blocks import HostPage
from moeserve.kv.layout import KvLayout
from moeserve.models.errors import ModelError
from moeserve.models.gpu_features import gpu_shape
from moeserve.models.open import open_model
from moeserve.models.registry import read_checked_shape
from moeserve.models.tensors import check_tensors, model_tensors
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.conftest import family_models
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import Engine, Fixture, distance
from tests.kernels.folders.folder_variants import edit_config
from tests.kernels.operations import COSTLY_ISAS, ISAS, stream_of
from tests.support.models.hugging_face_model import write_family
from tests.support.models.hugging_face_settings import INDEXED, INDEXED_FAMILIES

SPARSE = [
    model for family in ("glmdsa", "minimaxm3", "qwen4exp", "glm5next") for model in family_models(family)
]
TOP = INDEXED["index_topk"]
TOKENS = [(37 * i * i + 11 * i) % 4000 for i in range(150)]


def assert_chunks_change_nothing(model: Path, tokens: list[int]) -> None:
    engine, other = Engine(stream_of(ISAS[-1]), model), Engine(stream_of(ISAS[-1], 3), model)
    whole = engine.logits(tokens)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(tokens, chunk), whole)


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("model", SPARSE, ids=lambda model: model.stem)
def test_no_further_from_the_truth_than_llama_cpp(model: Path, isa: str) -> None:
    """A key more or less costs GLM-5 a median KL of 3e-2. Attending to all keys costs 1.3, MiniMax-M3 0.26,
    Flash-Next 9e-3 and GLM-5.3-Flash 1.2e-2."""
    fixture, engine = Fixture.load(model, model.parent), Engine(stream_of(isa), model)
    top, theirs = top_of(engine), fixture.llama_cpp
    found = [
        distance(truth, engine.logits(tokens))
        for truth, tokens in zip(fixture.truth, fixture.tokens, strict=True)
    ]
    kl, agrees = (torch.cat(column) for column in zip(*found, strict=True))
    assert torch.cat([of_text[:top] for of_text, _ in found]).max() < 10 * theirs["median_kl"]
    assert kl.median() <= theirs["median_kl"]
    assert agrees.double().mean() >= theirs["top1_agreement"] - 0.01


@pytest.mark.parametrize("model", SPARSE, ids=lambda model: model.stem)
def test_chunks_and_threads_change_nothing_beyond_the_chosen_number(model: Path) -> None:
    assert_chunks_change_nothing(model, Fixture.load(model, model.parent).tokens[-1])


@pytest.mark.parametrize("model", family_models("glmdsa"), ids=lambda model: model.stem)
def test_steps_in_which_no_row_chooses_compute_no_index_queries(model: Path) -> None:
    """They would read the queries' matrix for nothing. The keys are stored: later rows choose among them."""
    engine = Engine(stream_of(ISAS[-1]), model)
    indexer, tokens = engine.model._space.indexer, [token % 600 for token in TOKENS[: top_of(engine) + 1]]
    assert indexer is not None
    indexer.q.fill_(float("nan"))
    engine.logits(tokens[:-1], 1)
    assert indexer.q.isnan().all()
    engine.logits(tokens, 1)
    assert not indexer.q[0].isnan().any()


def top_of(engine: Engine) -> int:
    assert engine.config.indexer is not None
    return engine.config.indexer.rule.most_dense


def truth_of(folder: Path, model_type: str, seed: int, **changes: Any) -> torch.Tensor:
    """Writes a model, and gives transformers' logits of TOKENS in float32."""
    made = write_family(folder, model_type, torch.float32, seed, **changes)
    with torch.inference_mode():
        model = made.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        found: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("seed", [7, 8])
@pytest.mark.parametrize("model_type", INDEXED_FAMILIES)
def test_a_folder_is_what_transformers_computes(model_type: str, seed: int, isa: str, tmp_path: Path) -> None:
    truth, engine = truth_of(tmp_path, model_type, seed), Engine(stream_of(isa), tmp_path)
    kl, agrees = distance(truth, engine.logits(TOKENS))
    assert kl[:TOP].max() < 3e-5
    assert kl[TOP:].median() < 1e-5
    assert agrees.double().mean() > 0.9
    other = Engine(stream_of(isa, threads=3), tmp_path)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(TOKENS, chunk), engine.logits(TOKENS))


def test_each_layer_of_glm_may_have_its_own_choice(tmp_path: Path) -> None:
    """As in GLM-5: config.json says nothing, and every layer has an indexer."""
    truth = truth_of(tmp_path, "glm_moe_dsa", 9, indexer_types=["full"] * 3)
    edit_config(tmp_path, indexer_types=None, index_topk_freq=None)
    kl, _ = distance(truth, Engine(stream_of(ISAS[-1]), tmp_path).logits(TOKENS))
    assert kl.median() < 1e-5


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"indexer_types": ["full", "half", "full"]}, "'indexer_types' is"),
        ({"indexer_types": ["full"]}, "'indexer_types' is"),
        ({"indexer_types": ["shared", "full", "full"]}, "begins with a layer that has no indexer"),
        ({"indexer_types": None, "index_topk_freq": "x"}, "'index_topk_freq' is 'x'"),
        ({"index_topk": 0}, "'index_topk' is 0; 1 to"),
        ({"index_head_dim": 16}, "'index_head_dim' is 16; 32 to 1024"),
        ({"index_n_heads": None}, "index_n_heads"),
    ],
    ids=str,
)
def test_folders_that_would_be_computed_wrongly(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    write_family(tmp_path, "glm_moe_dsa")
    edit_config(tmp_path, **changes)
    with pytest.raises(ModelError, match=said):
        read_checked_shape(open_model(tmp_path))


@pytest.mark.parametrize("model_type", INDEXED_FAMILIES)
def test_index_keys_come_back_with_a_page(model_type: str, tmp_path: Path) -> None:
    """A prefix whose slots were written to a page, lost and read back gives the same bits; without its index keys,
    others."""
    write_family(tmp_path, model_type)
    engine = Engine(stream_of(ISAS[-1]), tmp_path)
    whole = engine.logits(TOKENS)
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(len(TOKENS))).int()[:100].numpy()
    layers: list[KvLayer] = list(engine.model._kv)
    assert sum(layer.index_keys is not None for layer in layers) == (2 if model_type == "glm_moe_dsa" else 3)
    pages = CachePages(kv_tensors(layers), len(slots))
    page = HostPage([torch.empty(pages.page_bytes, dtype=torch.uint8)], [0])
    pages.out([Move(slots, page)])
    engine.model.forget(slots.tolist())
    assert not torch.equal(engine.logits(TOKENS, start=100), whole[100:])
    pages.into([Move(slots, page)], pages.mark())
    assert torch.equal(engine.logits(TOKENS, start=100), whole[100:])


@pytest.mark.parametrize("model_type", INDEXED_FAMILIES)
def test_a_worker_gives_a_row_the_same_bits_alone_and_in_a_crowd(model_type: str, tmp_path: Path) -> None:
    write_family(tmp_path, model_type)
    config = small_config(tmp_path, device="cpu", threads=2, max_num_seqs=4, max_model_len=256)
    runner = load_cpu_runner(config, lambda *_: None)
    whole = Driver(runner).score(0, TOKENS, len(TOKENS))
    for chunk in (7, 33):
        assert Driver(runner).score(1, TOKENS, chunk) == whole
    expected = Engine(stream_of(ISAS[-1]), tmp_path).logits(TOKENS).double().log_softmax(-1)
    assert [entry.logprob for entry in whole[: len(TOKENS) - 1]] == pytest.approx(
        [expected[i, token].item() for i, token in enumerate(TOKENS[1:])], abs=1e-4
    )


def test_a_gpu_chooses_keys_only_for_requests_that_may_have_more(tmp_path: Path) -> None:
    """Else it attends to all keys, and reads no indexer."""
    write_family(tmp_path, "glm_moe_dsa")
    source = open_model(tmp_path)
    whole = read_checked_shape(source)
    assert gpu_shape(whole, None) == gpu_shape(whole, TOP + 1) == whole
    shape = gpu_shape(whole, TOP)
    check_tensors(shape, source)
    assert shape.context_length == TOP
    assert not any("indexer" in name for name in model_tensors(shape))
    assert KvLayout(shape).layer_bytes(0) == 2 * (64 + 32)


def test_a_token_takes_the_bytes_of_its_index_keys(tmp_path: Path) -> None:
    write_family(tmp_path, "glm_moe_dsa")
    layout = KvLayout(read_checked_shape(open_model(tmp_path)))
    latent, index = 2 * (64 + 32), 2 * INDEXED["index_head_dim"]
    assert [layout.layer_bytes(layer) for layer in range(3)] == [latent + index, latent, latent + index]
    assert np.isclose(layout.token_bytes(), 3 * latent + 2 * index)
