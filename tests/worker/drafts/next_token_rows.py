"""A next-token block driven by hand, over models that have one."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.models.blocks.cpu.next_token import CpuNextTokenBlock, NextTokenRows
from tests.kernels.engines.model_engine import MAX_TOKENS, Engine
from tests.kernels.operations import ISAS, stream_of

# The files lie apart from their truths where an earlier set of fixtures has them already.
MODELS = {
    "qwen35": "next/tiny-qwen35-f16",
    "hyv3": "next/tiny-hyv3-f16",
    "glm4moe": "families/tiny-glm4moe-f16",
    "glmdsa": "next/tiny-glmdsa-f16",
    "bailing3": "next/tiny-bailing3-f16",
}


def model_of(name: str, fixtures: Path) -> Path:
    """Skips the test where a file of a later set of fixtures is not there. name: of MODELS, or a path."""
    path = fixtures / f"{MODELS.get(name, name)}.gguf"
    if not path.exists():
        pytest.skip(f"there is no {path}")
    return path


class Drafting:
    """A sequence of the trunk, and the block's rows of it."""

    def __init__(self, path: Path, tokens: list[int]) -> None:
        self.engine = Engine(stream_of(ISAS[-1]), path, drafts=True)
        self.engine.logits(tokens)
        block = self.engine.model.next_token
        assert block is not None
        self.block: CpuNextTokenBlock = block
        self.tokens = np.array(tokens, np.int32)
        self.states = block.model_states(block.model_rows(len(tokens))).clone()
        self.kv_slots = np.arange(MAX_TOKENS, dtype=np.int32)[::-1].copy()  # any order

    def rows(self, first: int, end: int) -> NextTokenRows:
        positions = np.arange(first - 1, end - 1, dtype=np.int32)
        states = self.states[first - 1 : end - 1].contiguous()
        return NextTokenRows(self.tokens[first:end], states, positions, self.kv_slots[first:end])

    def logits(self, row: int) -> torch.Tensor:
        table = np.ascontiguousarray(self.kv_slots[None, 1:])
        found = self.block.predict(self.rows(row, row + 1), np.zeros(1, np.int32), table)
        logits = self.engine.model._space.logits[0].clone()
        assert found.token_ids.tolist() == [int(logits.argmax())]
        assert found.probabilities[0] == pytest.approx(float(logits.softmax(0).max()), rel=1e-4)
        return logits
