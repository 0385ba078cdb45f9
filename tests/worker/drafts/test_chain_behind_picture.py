"""A GPU's chain of drafts behind the last chunk of a prompt, whose last tokens are a picture's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moeserve.messages.prompt_embeddings import SECTIONS, EmbeddingSpan
from moeserve.models.blocks.gpu.chain_inputs import ChainInputs
from moeserve.worker.drafts.drafter import PendingTokens, Wanted
from moeserve.worker.drafts.gpu_next_token_drafter import GpuNextTokenDrafter
from moeserve.worker.engines.gpu.next_token_chain import ChainStart, _fill, _Room
from moeserve.worker.engines.rotary_positions import RotaryPositions
from moeserve.worker.sequences import Sequences

DEPTHS, START, HEIGHT, WIDTH = 2, 3, 2, 4
END = START + HEIGHT * WIDTH


class Chain:
    """Its inputs are filled, and nothing is computed."""

    vocab_size, frequent_tokens, most_rows, depths, width = 64, None, 4, DEPTHS, 4

    def __init__(self) -> None:
        device = torch.device("cpu")
        self.room = _Room(ChainInputs(2, DEPTHS, 0, SECTIONS, device), device)

    def launch(self, start: ChainStart) -> object:
        _fill(self.room, start, DEPTHS, with_panels=False)
        return SimpleNamespace()


def test_the_last_token_before_the_answer_is_a_pictures() -> None:
    """The shift is that of the sampled token. Another request's prompt is text."""
    time = np.full(HEIGHT * WIDTH, START)
    rows, columns = START + np.divmod(np.arange(HEIGHT * WIDTH), WIDTH)[0], START + np.arange(8) % WIDTH
    positions = np.stack([time, rows, columns]).astype(np.int32).tobytes()
    rotary = RotaryPositions()
    rotary.bind(0, [EmbeddingSpan(START, HEIGHT * WIDTH, b"", "", positions)])
    sequences, chain = Sequences(2, 32), Chain()
    drafter = GpuNextTokenDrafter(sequences, chain, rotary=rotary)  # type: ignore[arg-type]
    first = np.array([END, 7], np.int32)
    none: Any = np.zeros(2, np.int32)
    pending = PendingTokens(
        np.arange(2, dtype=np.int32), none, first, none, np.arange(2, dtype=np.int32)[None]
    )
    assert drafter.launch_ahead([Wanted(0, END + 1, DEPTHS), Wanted(1, 8, DEPTHS)], pending)
    assert chain.room.columns.shifts[:2].tolist() == [WIDTH - HEIGHT * WIDTH, 0]
