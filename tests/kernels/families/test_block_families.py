"""Families whose attention chooses blocks of keys, beside transformers' models of the same weights: other seeds, sizes
of blocks and types than the fixtures', and contexts of many times the keys that are chosen."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.stream_operands import KvLayer
from moeserve.kv.cache_pages import CachePages, Move, kv_tensors
from moeserve.kv.host_blocks import HostPage
from moeserve.kv.layout import Q8_0, KvLayout
from moeserve.models.gpu_features import gpu_shape
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.models.tensors import check_tensors, model_tensors
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import Engine, distance
from tests.kernels.operations import COSTLY_ISAS, ISAS, stream_of
from tests.support.models import minimaxm3_model, qwen4exp_model
from tests.support.nightly import nightly_after

TOKENS: list[int] = torch.randint(0, 600, (200,), generator=torch.Generator().manual_seed(5)).tolist()
# Sizes of blocks, and numbers of chosen ones, by name.
MINIMAX_SIZES: dict[str, dict[str, int]] = {
    "3 of 16": {},
    "4 of 40, 2 local": {"index_topk_blocks": 4, "index_local_blocks": 2, "index_block_size": 40},
}
QWEN_SIZES: dict[str, dict[str, int]] = {
    "8 of 4": {},
    "3 of 8": {"indexer_budget": 24, "indexer_compress_ratio": 8},
}
FAMILIES = {"minimax-m3": (minimaxm3_model, MINIMAX_SIZES), "qwen4exp": (qwen4exp_model, QWEN_SIZES)}
CASES = [(family, sizes) for family, (_, each) in FAMILIES.items() for sizes in each]
each_family = pytest.mark.parametrize("family", FAMILIES)
Write = Callable[..., Path]


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Write:
    """Writes a family's model once; the truth is in `truths`, by file."""

    @cache
    def written(family: str, sizes: str = "", seed: int = 8, kind: Type = Type.F16) -> Path:
        module, by_name = FAMILIES[family]
        path = tmp_path_factory.mktemp("model") / "m.gguf"
        model: Any = module.new_model(seed, **by_name.get(sizes, {}))
        module.write_model(model, path, kind)
        torch.save(module.logits(model, TOKENS), path.with_suffix(".pt"))
        return path

    return written


def truth_of(path: Path) -> torch.Tensor:
    found: torch.Tensor = torch.load(path.with_suffix(".pt"))
    return found


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("seed", nightly_after(1, [8, 9]))
@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_as_transformers_computes_it(family: str, sizes: str, seed: int, isa: str, write: Write) -> None:
    """llama.cpp's median KL on the fixtures is 6.4e-6 and 4.8e-6. A router's near tie is in any part of the text."""
    path = write(family, sizes, seed)
    engine, truth = Engine(stream_of(isa), path), truth_of(path)
    kl, agrees = distance(truth, engine.logits(TOKENS))
    assert engine.config.indexer is not None
    assert engine.config.context_length == 4096
    assert kl[: engine.config.indexer.rule.most_dense].quantile(0.9) < 3e-5
    assert kl.median() < 2e-6
    assert agrees.double().mean() > 0.98


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_attending_to_all_keys_would_be_seen(family: str, sizes: str, write: Write) -> None:
    """The texts are long enough for the choice to matter, so that the test above would fail without it."""
    path = write(family, sizes)
    engine = Engine(stream_of(ISAS[-1]), path)
    assert engine.config.indexer is not None
    kl, _ = distance(truth_of(path), dense_logits(path))
    assert kl[engine.config.indexer.rule.most_dense :].median() > 1e-4


def dense_logits(path: Path) -> torch.Tensor:
    """As if every block were chosen, by another number in the header."""
    data = bytearray(path.read_bytes())
    key = b"attention.indexer.top_k"
    at = data.index(key) + len(key) + 4
    data[at : at + 4] = (4000).to_bytes(4, "little")
    other = path.with_name("dense.gguf")
    other.write_bytes(data)
    return Engine(stream_of(ISAS[-1]), other).logits(TOKENS)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0], ids=lambda kind: kind.name)
@each_family
def test_quantised_weights_choose_likewise(family: str, kind: Type, write: Write) -> None:
    """The bounds are llama.cpp's median KL in Q4_K_M."""
    path = write(family, "", 8, kind)
    kl, _ = distance(truth_of(path), Engine(stream_of(ISAS[-1]), path).logits(TOKENS))
    assert kl.median() < {"qwen4exp": 1.4e-3, "minimax-m3": 5.7e-3}[family]


@pytest.mark.parametrize(("family", "sizes"), CASES)
def test_chunks_and_threads_do_not_change_a_bit(family: str, sizes: str, write: Write) -> None:
    path = write(family, sizes)
    engine, other = Engine(stream_of(ISAS[-1]), path), Engine(stream_of(ISAS[-1], 3), path)
    whole = engine.logits(TOKENS)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(TOKENS, chunk), whole)


@each_family
def test_with_keys_and_values_of_8_bits(family: str, write: Write) -> None:
    """Index keys stay float16; rounded keys and values change the layers behind, and what they choose."""
    path = write(family)
    engine = Engine(stream_of(ISAS[-1]), path, kv_dtype=Q8_0)
    whole = engine.logits(TOKENS)
    kl, agrees = distance(truth_of(path), whole)
    assert kl.median() < 1e-3
    assert agrees.double().mean() > 0.9
    for chunk in (7, 33):
        assert torch.equal(engine.logits(TOKENS, chunk), whole)


@each_family
def test_a_worker_gives_a_row_the_same_bits_alone_and_in_a_crowd(family: str, write: Write) -> None:
    config = small_config(write(family), device="cpu", threads=2, max_num_seqs=4, max_model_len=400)
    runner = load_cpu_runner(config, lambda *_: None)
    whole = Driver(runner).score(0, TOKENS, len(TOKENS))
    for chunk in (7, 33):
        assert Driver(runner).score(1, TOKENS, chunk) == whole
    expected = Engine(stream_of(ISAS[-1]), write(family)).logits(TOKENS).double().log_softmax(-1)
    assert [entry.logprob for entry in whole[: len(TOKENS) - 1]] == pytest.approx(
        [expected[i, token].item() for i, token in enumerate(TOKENS[1:])], abs=1e-4
    )


@pytest.mark.parametrize("border", [100, 101, 103])
def test_index_keys_come_back_with_a_page(border: int, write: Write) -> None:
    """Wherever a block is cut: a prefix whose slots were written to a page, lost and read back gives the same bits."""
    engine = Engine(stream_of(ISAS[-1]), write("minimax-m3"))
    whole = engine.logits(TOKENS)
    slots = torch.randperm(512, generator=torch.Generator().manual_seed(len(TOKENS))).int()[:border].numpy()
    layers: list[KvLayer] = list(engine.model._kv)
    assert [layer.index_keys is not None for layer in layers] == [False, True, True]
    pages = CachePages(kv_tensors(layers), len(slots))
    page = HostPage([torch.empty(pages.page_bytes, dtype=torch.uint8)], [0])
    pages.out([Move(slots, page)])
    engine.model.forget(slots.tolist())
    assert not torch.equal(engine.logits(TOKENS, start=border), whole[border:])
    pages.into([Move(slots, page)], pages.mark())
    assert torch.equal(engine.logits(TOKENS, start=border), whole[border:])


def test_a_token_takes_the_bytes_of_its_index_keys(write: Write) -> None:
    layout = KvLayout(read_checked_shape(open_gguf(write("minimax-m3"))))
    keys_and_values, index = 2 * 2 * 2 * 64, 2 * 64
    assert [layout.layer_bytes(layer) for layer in range(3)] == [
        keys_and_values,
        keys_and_values + index,
        keys_and_values + index,
    ]
    layout = KvLayout(read_checked_shape(open_gguf(write("qwen4exp"))), Q8_0)
    assert layout.token_bytes() == 2 * (256 + 256 // 32 * 2) + 2 * 128


def test_a_gpu_chooses_blocks_only_for_requests_that_may_have_more(write: Write) -> None:
    """Else it attends to all keys, and reads no indexer."""
    source = open_gguf(write("minimax-m3"))
    whole = read_checked_shape(source)
    assert gpu_shape(whole, None) == gpu_shape(whole, 3 * 16 + 1) == whole
    shape = gpu_shape(whole, 3 * 16)
    check_tensors(shape, source)
    assert shape.context_length == 3 * 16
    assert not any("indexer" in name for name in model_tensors(shape))
    assert KvLayout(shape).token_bytes() == 3 * 2 * 2 * 2 * 64


@pytest.mark.parametrize("chunk", [200, 33, 1])
def test_blocks_rotate_as_at_their_first_token_behind_a_picture(chunk: int, tmp_path: Path) -> None:
    """Tokens 50 to 89 have positions of their own by section, as a picture of 5 x 8; those behind are shifted by 32."""
    positions = torch.arange(len(TOKENS)).tile(3, 1)
    positions[:, 90:] -= 32
    positions[:, 50:90] = torch.stack(
        [torch.full((40,), 50), 50 + torch.arange(5).repeat_interleave(8), 50 + torch.arange(8).repeat(5)]
    )
    model = qwen4exp_model.new_model(8)
    engine = Engine(stream_of(ISAS[-1]), qwen4exp_model.write_model(model, tmp_path / "m.gguf", Type.F16))
    truth = qwen4exp_model.logits(model, TOKENS, positions)
    kl, _ = distance(truth, engine.logits(TOKENS, chunk, positions=positions))
    assert kl.median() < 2e-6
    assert kl[90:].quantile(0.9) < 3e-5
