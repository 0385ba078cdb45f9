"""The scripts that made the packaged model: what is trained is what is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from moeserve.models.sources.gguf import open_gguf
from tests.kernels.engines.model_engine import Engine
from tests.kernels.operations import ISAS, stream_of
from training import tokenizer
from training.encode import Encoder, Steps
from training.export import export
from training.model import Model, balance_loss, generate
from training.shape import Shape
from training.train import Recipe, load, save, train

SMALL = Shape(
    vocab=512,
    hidden=64,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=32,
    experts=4,
    top_k=2,
    expert_width=32,
    context=512,
)


@pytest.fixture(scope="module", autouse=True)
def gradients() -> None:
    """A runner that another file's fixture loaded in this process has turned them off."""
    torch.set_grad_enabled(True)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "vocabulary.gguf"
    tokenizer.write(path, SMALL, num_examples=200)
    return path


@pytest.fixture(scope="module")
def trained(vocabulary: Path) -> Model:
    recipe = Recipe(steps=12, examples=12, max_tokens=1024, warmup=2)
    model = Model(SMALL)
    train(model, vocabulary, recipe, workers=0)
    return model


@pytest.mark.slow
def test_training_lowers_the_loss_and_balances_experts(vocabulary: Path, trained: Model) -> None:
    """On a step that was not trained on."""
    (batches,) = (Steps(vocabulary, 1, 8, 4096, SMALL.context, seed=1)[0],)
    before = Model(SMALL)
    for batch in batches:
        counts = batch.weights > 0

        def loss(model: Model, batch: Any = batch, counts: torch.Tensor = counts) -> float:
            logits, _ = model(batch.ids)
            return float(
                torch.nn.functional.cross_entropy(
                    logits[:, :-1][counts[:, :-1]], batch.ids[:, 1:][counts[:, :-1]]
                )
            )

        with torch.no_grad():
            assert loss(trained) < loss(before) - 0.3
    even = torch.full((1, 1, 8, 4), 0.25) + torch.eye(4).repeat(2, 1) * 0.04 - 0.01
    assert balance_loss(even, 1, torch.ones(1, 8, dtype=torch.bool)) == pytest.approx(1.0)


@pytest.mark.slow
def test_the_served_model_computes_what_was_trained(vocabulary: Path, trained: Model, tmp_path: Path) -> None:
    """In F32 to rounding; in Q8_0 nearly."""
    encoder = Encoder.from_gguf(vocabulary)
    prompt = encoder.ids("<|im_start|>user\nWhat is 12 + 30?<|im_end|>\n<|im_start|>assistant\n")
    with torch.no_grad():
        expected = trained(torch.tensor([prompt]))[0][0].log_softmax(-1)
    for quantise, limit in ((False, 1e-3), (True, 2e-2)):
        path = tmp_path / f"{quantise}.gguf"
        export(trained, open_gguf(vocabulary), path, quantise)
        served = Engine(stream_of(ISAS[-1]), path).logits(prompt).log_softmax(-1)
        assert (expected.exp() * (expected - served)).sum(-1).max() < limit


def test_weights_come_back(trained: Model, vocabulary: Path, tmp_path: Path) -> None:
    save(trained, tmp_path / "model.pt")
    again = load(tmp_path / "model.pt")
    prompts = [[5, 6, 7], [8]]
    assert generate(again, prompts, end=0, max_tokens=4) == generate(trained, prompts, end=0, max_tokens=4)


def test_a_step_is_its_seed_and_its_number(vocabulary: Path) -> None:
    first, again = (Steps(vocabulary, 3, 6, 1024, SMALL.context)[2] for _ in range(2))
    other = Steps(vocabulary, 3, 6, 1024, SMALL.context, seed=1)[2]
    assert all(a.ids.equal(b.ids) and a.weights.equal(b.weights) for a, b in zip(first, again, strict=True))
    assert not all(a.ids.equal(b.ids) for a, b in zip(first, other, strict=False))
