"""A model's own next-token block (MTP) on the CPU, beside Hugging Face's truth and llama.cpp."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.models.errors import ModelError
from moeserve.models.next_token import with_next_token_block
from moeserve.models.open import open_model
from moeserve.models.registry import read_checked_shape
from tests.conftest import OWN_FIXTURES
from tests.kernels.engines.model_engine import distance
from tests.worker.drafts.next_token_rows import MODELS, Drafting, model_of


@pytest.fixture(params=MODELS, name="model")
def _model(request: pytest.FixtureRequest, wide_fixtures: Path) -> Path:
    return model_of(request.param, wide_fixtures)


# Experts beside recurrent layers, and quantised.
QWEN35MOE = [f"families/tiny-qwen35moe-{kind}" for kind in ("f16", "q8_0", "q4_k_m")]


@pytest.mark.parametrize("name", [*MODELS, *QWEN35MOE, "next/tiny-qwen35moe-iq2_xxs"])
def test_no_further_from_the_truth_than_llama_cpp(name: str, wide_fixtures: Path) -> None:
    model = model_of(name, wide_fixtures)
    folder = wide_fixtures / ("families" if name in QWEN35MOE else "next")
    golden = json.loads((folder / f"{model.stem}.golden.json").read_text())
    truth = np.load(folder / f"{model.stem}.truth.npz", allow_pickle=False)
    apart, agrees, theirs = [], [], golden["mtp_llama_cpp_vs_truth"]
    for number in range(2 if theirs["positions"] == 50 else 3):
        tokens = golden["cases"][number]["tokens"]
        drafting = Drafting(model, tokens)
        logits = torch.stack([drafting.logits(row) for row in range(1, len(tokens))])
        kl, same = distance(torch.from_numpy(truth[f"mtp_case{number}"].astype(np.float64)), logits)
        apart.append(kl)
        agrees.append(same)
    assert len(torch.cat(agrees)) == theirs["positions"]
    most = 1.1 * theirs["median_kl"]
    if not model.stem.endswith("f16"):  # 81 positions tell nothing of agreement where weights are rounded
        assert torch.cat(apart).median().item() <= most
        return
    assert torch.cat(apart).median().item() <= min(1e-5, most)
    assert torch.cat(agrees).double().mean().item() >= theirs["top1_agreement"] - 0.02


def test_stored_rows_are_those_that_were_predicted(model: Path) -> None:
    """Bit for bit: also where they are stored in chunks."""
    tokens = np.random.default_rng(3).integers(5, 600, 40).tolist()
    one_by_one, stored = Drafting(model, tokens), Drafting(model, tokens)
    expected = [one_by_one.logits(row) for row in range(1, 40)]
    stored.block.store(stored.rows(1, 7))
    stored.block.store(stored.rows(7, 39))
    assert torch.equal(stored.logits(39), expected[-1])


def test_cleared_rows_are_zero(model: Path) -> None:
    """Keys, values and the keys of an indexer are; other rows stay as they were."""
    drafting = Drafting(model, np.random.default_rng(3).integers(5, 600, 12).tolist())
    block, places = drafting.block, torch.from_numpy(drafting.kv_slots).long()
    block.store(drafting.rows(1, 12))
    before = [tensor[places[1:12]].clone() for tensor in block._kv.tensors]
    assert all(tensor.flatten(1).any(dim=1).all() for tensor in before)
    block.clear(drafting.kv_slots[4:9])
    for old, tensor in zip(before, block._kv.tensors, strict=True):
        assert not tensor[places[4:9]].any()
        assert torch.equal(tensor[places[1:4]], old[:3])
        assert torch.equal(tensor[places[9:12]], old[8:])


def test_panels_alone_are_scored(model: Path) -> None:
    """The likeliest of their tokens, with its probability among them, for each of several rows."""
    drafting = Drafting(model, np.random.default_rng(3).integers(5, 600, 4).tolist())
    whole, row = drafting.logits(1), drafting.rows(1, 2)
    table = np.ascontiguousarray(drafting.kv_slots[None, 1:])
    panels = np.array([1, 4, len(whole) // 32 - 1], np.int32)
    scored = torch.cat([torch.arange(32 * panel, 32 * panel + 32) for panel in panels.tolist()])
    found = drafting.block.predict(row, np.zeros(1, np.int32), table, panels)
    assert found.token_ids.tolist() == [int(scored[whole[scored].argmax()])]
    assert found.probabilities[0] == pytest.approx(float(whole[scored].softmax(0).max()), rel=1e-4)
    only = np.array([found.token_ids[0] // 32], np.int32)
    again = drafting.block.predict(row, np.zeros(1, np.int32), table, only)
    assert again.token_ids.tolist() == found.token_ids.tolist()


def test_a_file_without_it_is_refused() -> None:
    source = open_model(OWN_FIXTURES / "tiny-qwen3next-q4_k_m.gguf")
    shape = read_checked_shape(source)
    with pytest.raises(ModelError, match=r"no next-token block.*converted with it.*ngram"):
        with_next_token_block(shape, source)
