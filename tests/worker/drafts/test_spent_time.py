"""What drafting takes on a machine where it is paused for other programs: the router's accounts are charged for its
work, not for the pauses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import CONTINUES, NewSeq, Row
from moeserve.worker.drafts.draft_rows import DraftRows
from moeserve.worker.drafts.drafter import Reading, Wanted
from moeserve.worker.drafts.model_drafter import ModelDrafter
from moeserve.worker.drafts.next_token_drafter import NextTokenDrafter
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.engines.small_model import Likeliest
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

PAUSE_S = 0.2


def paused() -> None:
    """Another program has the CPU: time passes and this process does not compute."""
    time.sleep(PAUSE_S)


class PausedDrafter:
    """Is paused while it drafts."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def bind(self, slot: int, namespace: str) -> None:
        pass

    def catch_up(self) -> None:
        self.called.append("catch up")

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        self.called.append("draft")
        paused()
        return [np.ones(max(one.most, 0), np.int32) for one in wanted]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        pass


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_pause_is_not_the_drafts_time(on_gpu: bool) -> None:
    """On a GPU the host's wait is its time."""
    sequences = Sequences(1, 16)
    rows = DraftRows(sequences, PausedDrafter(), Reading(), on_gpu=on_gpu)
    seq = NewSeq(0, np.ones(3, np.int32).tobytes(), 3, b"", SamplingParams(max_tokens=9))
    rows.bind(seq)
    sequences.bind(seq)
    _, drafted = rows.place([Row(0, CONTINUES, 3, np.arange(3, dtype=np.int32).tobytes(), True)])
    assert drafted == [2]
    assert (rows.draft_ms > PAUSE_S * 500) == on_gpu


def test_what_is_told_before_a_request_is_bound_is_the_drafts_time() -> None:
    """Tokens of steps in which nothing may be drafted; the block's rows are stored before."""
    sequences, drafter = Sequences(2, 16), PausedDrafter()
    rows = DraftRows(sequences, drafter, Reading(), on_gpu=True)

    def bind(slot: int) -> None:
        seq = NewSeq(slot, np.ones(3, np.int32).tobytes(), 3, b"", SamplingParams(max_tokens=9))
        rows.bind(seq)
        sequences.bind(seq)

    def place() -> float:
        rows.place([Row(0, CONTINUES, 1, b"", True)])
        return rows.draft_ms

    bind(0)
    assert place() == 0.0
    assert drafter.called == []
    bind(1)
    assert drafter.called == ["catch up", "draft"]
    assert place() > PAUSE_S * 500
    assert place() == 0.0


class PausedSmallModel:
    """A small model for whose steps the host sleeps."""

    shape, has_states, most_sequences = SimpleNamespace(vocab_size=64), False, 4

    def launch(self, layout: StepLayout, sequences: Sequences) -> None:
        pass

    def wait(self) -> None:
        paused()

    def likeliest(self, layout: StepLayout, vocab_size: int) -> Likeliest:
        return Likeliest([1], [0.0], torch.zeros(1, vocab_size))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_the_wait_for_a_text_is_not_the_drafts_time(on_gpu: bool) -> None:
    """The time on a GPU is the reading's, so that drafts do not seem dear."""
    sequences, reading = Sequences(1, 64), Reading()
    model = PausedSmallModel()
    drafter = ModelDrafter(sequences, model, 64, 64, 64, reading, None)  # type: ignore[arg-type]
    rows = DraftRows(sequences, drafter, reading, on_gpu=on_gpu)
    seq = NewSeq(0, np.ones(40, np.int32).tobytes(), 40, b"", SamplingParams(max_tokens=9))
    rows.bind(seq)
    sequences.bind(seq)
    sequences.kv_slots[0] = np.arange(64)
    rows.place([Row(0, CONTINUES, 3, np.arange(40, 43, dtype=np.int32).tobytes(), True)])
    assert (rows.read_ms > PAUSE_S * 500) == on_gpu
    assert rows.draft_ms < PAUSE_S * 500


class PausedBlock:
    """A block whose program is paused while it keeps up with the texts."""

    hidden_size, vocab_size, frequent_tokens, most_rows = 4, 64, 64, 8

    def wait(self) -> None:
        pass

    def model_rows(self, n: int) -> torch.Tensor:
        paused()
        return torch.zeros(n, self.hidden_size)


def test_a_pause_is_not_the_keeping_blocks_time() -> None:
    keeping = Keeping()
    drafter = NextTokenDrafter(Sequences(1, 16), PausedBlock(), keeping=keeping)  # type: ignore[arg-type]
    layout = StepLayout([Row(0, 0, 3, np.arange(3, dtype=np.int32).tobytes(), True)])
    drafter.computed(layout, np.zeros(1, np.int32))
    assert 0.0 < keeping.ms < PAUSE_S * 500
