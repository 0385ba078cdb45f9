"""How many tokens a step takes, and the memory that pages give for it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from moeserve.config.units import GIB
from moeserve.models.step_buffers import gpu_arena_bytes
from moeserve.placement.step_tokens import MOST_ON_GPU, ON_CPU, step_tokens
from tests.support.model_header import qwen3moe

DOCS = Path(__file__).parents[3] / "docs"
SHAPE = qwen3moe()


def test_a_step_has_as_many_tokens_as_the_memory_allows() -> None:
    assert step_tokens(None, SHAPE, None) == ON_CPU
    assert step_tokens(None, SHAPE, 1 * GIB) == ON_CPU
    assert step_tokens(None, SHAPE, 1000 * GIB) == MOST_ON_GPU
    assert [step_tokens(100, SHAPE, size) for size in (None, GIB, 1000 * GIB)] == [100, 100, 100]


def test_pages_give_a_steps_memory_as_it_is() -> None:
    arena = partial(gpu_arena_bytes, SHAPE, MOST_ON_GPU, "bfloat16")
    kb, kb_of_floats = (arena(float_weights=floats) / MOST_ON_GPU / 1e3 for floats in (False, True))
    planner = (DOCS / "explanation" / "planner.md").read_text()
    assert f"{kb:.0f} KB a token; {kb_of_floats:.0f} KB where weights are floats" in planner
    use_a_gpu = " ".join((DOCS / "how-to" / "use-a-gpu.md").read_text().split())
    assert f"For Qwen3-30B-A3B, with {kb:.0f} KB a token" in use_a_gpu
    said = re.search(
        r"that is ([\d,]+) from (\d+) GiB on, ([\d,]+) with (\d+) GiB and ([\d,]+) with (\d+) GiB", use_a_gpu
    )
    assert said is not None
    numbers = [int(number.replace(",", "")) for number in said.groups()]
    tokens, sizes = numbers[::2], numbers[1::2]
    assert [step_tokens(None, SHAPE, size * GIB) for size in sizes] == tokens
    assert step_tokens(None, SHAPE, (sizes[0] - 1) * GIB) < tokens[0], "from so many on"
