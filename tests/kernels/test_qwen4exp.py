"""Qwen3.8-Flash-Next on the CPU engine, beside transformers' model of the same weights: other seeds and types than the
fixture's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type

from tests.kernels.model_engine import Engine, distance
from tests.kernels.operations import COSTLY_ISAS, ISAS, stream_of
from tests.support.qwen4exp_model import END, logits, new_model, write_model

# llama.cpp's median KL on the fixtures: 6.4e-6 in F16, 1.4e-3 in Q4_K_M.
BOUNDS = {Type.F16: 6.4e-6, Type.Q8_0: 1.4e-3, Type.Q5_1: 1.4e-3, Type.Q4_0: 1.4e-3}


def text(seed: int, length: int = 120) -> list[int]:
    """Random tokens, in which some n-grams come again and one is cut by an end."""
    found: list[int] = torch.randint(
        0, END, (length,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    found[40] = END
    found[60:70] = found[20:30]
    return found


@pytest.mark.parametrize("isa", COSTLY_ISAS)
@pytest.mark.parametrize("kind", BOUNDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", [8, 9])
def test_as_near_to_transformers_as_llama_cpp(seed: int, kind: Type, isa: str, tmp_path: Path) -> None:
    model = new_model(seed)
    engine = Engine(stream_of(isa), write_model(model, tmp_path / "m.gguf", kind))
    tokens = text(seed)[: engine.config.context_length]
    kl, agrees = distance(logits(model, tokens), engine.logits(tokens))
    print(f"seed {seed} {kind.name} {isa}: median KL {kl.median():.2e}, top-1 {agrees.double().mean():.1%}")
    assert kl.median() <= BOUNDS[kind]


def test_chunks_and_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    path = write_model(new_model(8), tmp_path / "m.gguf", Type.Q8_0)
    engine, other = Engine(stream_of(ISAS[-1]), path), Engine(stream_of(ISAS[-1], 3), path)
    tokens = text(8)[: engine.config.context_length]
    whole = engine.logits(tokens)
    for chunk in (1, 7, 33):
        assert torch.equal(other.logits(tokens, chunk), whole)
