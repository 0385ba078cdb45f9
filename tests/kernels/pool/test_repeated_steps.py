"""Small steps repeat the operations of earlier ones: the same bits, and each id is still checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from moeserve.kernels.attention.reference import Sequence
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.operation_queue import Recorded
from moeserve.kernels.stream_operands import StateDrafts, StateSequences
from moeserve.models.blocks.cpu.repeated_steps import MOST_ROWS
from moeserve.models.blocks.cpu.workspace import CpuBatch
from tests.conftest import OWN_FIXTURES, family_models
from tests.kernels.engines.model_engine import MAX_TOKENS, Engine
from tests.kernels.operations import ISAS, stream_of

# Of each kind of block: experts, a dense feed-forward, windows and sandwiched norms, windows with sinks, shared experts
# and a choice by token id, layers without attention, inputs of each layer and shared keys, scores with a limit.
MODELS = (
    "qwen3moe-q4_k_m",
    "exaone4-f16",
    "gemma3-q4_k_m",
    "mimo2-q4_k_m",
    "bailing2-q4_k_m",
    "nemotronnas-f16",
    "gemma4e-f16",
    "gemma2-f16",
    "llama4-q4_k_m",
)
# With recurrent states; steps of more rows of one sequence are not repeated.
RECURRENT = (
    "qwen3next-q4_k_m",
    "lfm2moe-f16",
    "kimilinear-f16",
    "granitehybrid-f16",
    "nemotronhmoe-f16",
    "falconh1-f16",
    "kimik3-f16",  # several streams, to which blocks attend
)
# Whose rows choose keys or blocks of them, or attend to entries of several tokens; most have several streams.
CHOOSING = [
    model
    for family in ("glmdsa", "minimaxm3", "qwen4exp", "glm5next", "deepseek4")
    for model in family_models(family)
]


class Counting(CpuStream):
    """Counts the launches that repeated operations."""

    repeats = 0

    def repeat(self, recorded: Recorded) -> bool:
        done = super().repeat(recorded)
        self.repeats += done
        return done


def engine_of(name: str, stream: CpuStream, *, repeats_steps: bool) -> Engine:
    return Engine(stream, OWN_FIXTURES / f"tiny-{name}.gguf", repeats_steps=repeats_steps)


def assert_the_same_bits(model: Path) -> None:
    expected = in_steps(Engine(stream_of(ISAS[-1]), model))
    stream = Counting(2, ISAS[-1])
    found = in_steps(Engine(stream, model, repeats_steps=True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert stream.repeats > 20  # two in each later step of up to MOST_ROWS rows, with states of one row


def text(engine: Engine, length: int) -> list[int]:
    ids = torch.randint(
        0, engine.config.vocab_size, (length,), generator=torch.Generator().manual_seed(length)
    )
    found: list[int] = ids.tolist()
    return found


def in_steps(engine: Engine) -> list[torch.Tensor]:
    """Logits of steps of 1 to `MOST_ROWS` rows and more, several of each kind; later ones have more KV before them."""
    chunks = (1, 7, MOST_ROWS, MOST_ROWS + 1, 3)
    return [
        engine.logits(text(engine, length), chunk)
        for length, chunk in zip((9, 30, 60, 70, 14), chunks, strict=True)
    ]


@pytest.mark.parametrize("name", MODELS + RECURRENT)
def test_the_same_bits(name: str) -> None:
    assert_the_same_bits(OWN_FIXTURES / f"tiny-{name}.gguf")


@pytest.mark.parametrize("model", CHOOSING, ids=lambda model: model.stem)
def test_the_same_bits_of_chosen_keys(model: Path) -> None:
    assert_the_same_bits(model)


def test_which_steps_with_states_are_repeated() -> None:
    model = engine_of("lfm2moe-f16", stream_of(ISAS[-1]), repeats_steps=True).model
    assert model._repeated is not None
    two = torch.tensor([1, 0], dtype=torch.int32)
    for states, is_taken in (
        (StateSequences(torch.arange(2), torch.ones(2), two), True),
        (StateSequences(torch.arange(2), torch.ones(2), two, StateDrafts(two, two)), False),
        (StateSequences(torch.arange(2), torch.ones(2), torch.ones(2)), False),
        (StateSequences(torch.zeros(1), two[:1] + 1, two[:1]), False),
        (None, False),
    ):
        assert model._repeated.takes(CpuBatch(2, two, two, states)) is is_taken


def test_a_buffer_that_grew_ends_the_records() -> None:
    """The first step of many rows moves the experts' sums: operations from before it would write where they were."""
    stream = Counting(2, ISAS[-1])
    engine = engine_of("qwen3moe-q4_k_m", stream, repeats_steps=True)
    tokens = text(engine, 12)
    before = engine.logits(tokens, 1)
    repeats = stream.repeats
    assert (
        repeats == 2 * 10
    )  # the first of twelve steps made room for its sums, so that the second was recorded too
    engine.logits(text(engine, MAX_TOKENS))
    assert torch.equal(engine.logits(tokens, 1), before)
    assert stream.repeats == repeats + 2 * 11  # the first step was recorded anew


def test_ids_out_of_range_are_refused() -> None:
    engine = engine_of("qwen3moe-q4_k_m", stream_of(ISAS[-1]), repeats_steps=True)
    tokens = text(engine, 5)
    expected = engine.logits(tokens, 1)
    vocab = engine.config.vocab_size
    with pytest.raises(IndexError, match=rf"token id {vocab} is not in \[0, {vocab}\)"):
        engine.logits([*tokens, vocab], 1)
    for what, sources in (("position", "positions"), ("KV slot", "kv_slots")):
        batch = engine._batch(tokens[:1], Sequence(0, 1, 0, torch.arange(MAX_TOKENS).int()))
        getattr(batch, sources)[0] = MAX_TOKENS
        with pytest.raises(IndexError, match=rf"{what} {MAX_TOKENS} is not in \[0, {MAX_TOKENS}\)"):
            engine.model.forward(batch)
        engine.stream.wait()
    assert torch.equal(engine.logits(tokens, 1), expected)


@pytest.mark.parametrize("model", family_models("deepseek4"), ids=lambda model: model.stem)
def test_slots_of_blocks_ends_as_a_router_gives_them(model: Path) -> None:
    """Only they have rows for entries; the slots of other positions have larger numbers."""
    expected = in_steps(Engine(stream_of(ISAS[-1]), model))
    stream = Counting(2, ISAS[-1])
    engine = Engine(stream, model, repeats_steps=True, slots_by_kind=True)
    assert all(torch.equal(a, b) for a, b in zip(in_steps(engine), expected, strict=True))
    assert stream.repeats > 20
    assert engine.slots is not None
    at = max(layer.block for layer in engine.kv) - 1
    batch = engine._batch([1], Sequence(0, 1, at, engine.slots))
    rows = min(layer.num_slots for layer in engine.kv if layer.block > at)
    batch.kv_slots[0] = rows
    with pytest.raises(IndexError, match=rf"entry's KV slot {rows} is not in \[0, {rows}\)"):
        engine.model.forward(batch)
    stream.wait()


def test_put_ids_copies_all_or_nothing() -> None:
    target = torch.full((4,), 9, dtype=torch.int32)
    CpuStream.put_ids("row", torch.tensor([1, 0], dtype=torch.int32), target, 2)
    assert target.tolist() == [1, 0, 9, 9]
    with pytest.raises(IndexError, match=r"row 2 is not in \[0, 2\)"):
        CpuStream.put_ids("row", torch.tensor([0, 2], dtype=torch.int32), target, 2)
    assert target.tolist() == [1, 0, 9, 9]
    with pytest.raises(ValueError, match="target"):
        CpuStream.put_ids("row", torch.zeros(5, dtype=torch.int32), target, 2)
