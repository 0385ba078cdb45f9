"""What drafting takes on a machine where it is paused for other programs: the router's accounts are charged for its
work, not for the pauses."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import CONTINUES, NewSeq, Row
from moeserve.worker.drafts.draft_rows import DraftRows
from moeserve.worker.drafts.drafter import Reading, Wanted
from moeserve.worker.drafts.next_token_drafter import NextTokenDrafter
from moeserve.worker.engines.keeping import Keeping
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

PAUSE_S = 0.2


def paused() -> None:
    """Another program has the CPU: time passes and this process does not compute."""
    time.sleep(PAUSE_S)


class PausedDrafter:
    """Is paused while it drafts."""

    def bind(self, slot: int, namespace: str) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        paused()
        return [np.ones(one.most, np.int32) for one in wanted]

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
