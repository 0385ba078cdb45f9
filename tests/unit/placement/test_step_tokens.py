"""How many tokens a step takes, and the memory that pages give for it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

from moeserve.config.units import GIB
from moeserve.models.step_buffers import gpu_arena_bytes
from moeserve.placement.engine_memory import cpu_workspace_bytes
from moeserve.placement.step_tokens import (
    MOST_FROM_DISK,
    MOST_ON_GPU,
    ON_CPU,
    SHARE_OF_EXPERT_RAM,
    step_tokens,
)
from tests.support.models.model_header import qwen3moe

DOCS = Path(__file__).parents[3] / "docs"
SHAPE = qwen3moe()


def test_a_step_has_as_many_tokens_as_the_memory_allows() -> None:
    assert step_tokens(None, SHAPE, None) == ON_CPU
    assert step_tokens(None, SHAPE, 1 * GIB) == ON_CPU
    assert step_tokens(None, SHAPE, 1000 * GIB) == MOST_ON_GPU
    assert [step_tokens(100, SHAPE, size) for size in (None, GIB, 1000 * GIB)] == [100, 100, 100]


def test_with_experts_on_disk_a_step_has_as_many_tokens_as_their_ram_allows() -> None:
    least = cpu_workspace_bytes(SHAPE, 2 * ON_CPU) / SHARE_OF_EXPERT_RAM
    assert step_tokens(None, SHAPE, None, int(least) - 1) == ON_CPU
    assert step_tokens(None, SHAPE, None, int(least) + 1) == 2 * ON_CPU
    assert step_tokens(None, SHAPE, None, 100 * GIB) == MOST_FROM_DISK
    assert step_tokens(100, SHAPE, None, 100 * GIB) == 100


def test_pages_give_a_steps_memory_as_it_is() -> None:
    arena = partial(gpu_arena_bytes, SHAPE, MOST_ON_GPU, "bfloat16")
    kb, kb_of_floats = (arena(float_weights=floats) / MOST_ON_GPU / 1e3 for floats in (False, True))
    planner = (DOCS / "explanation" / "planner.md").read_text()
    assert {f"{kb:.0f}", f"{kb_of_floats:.0f}"} <= set(re.findall(r"([\d,]+) KB", planner))
    use_a_gpu = (DOCS / "how-to" / "use-a-gpu.md").read_text()
    (paragraph,) = (part for part in use_a_gpu.split("\n\n") if f"{kb:.0f} KB" in part)
    # Tokens and the GPU memory from which on a step has as many, in this order.
    numbers = [
        int(number.replace(",", ""))
        for number in re.findall(r"(\d+,\d{3}|\d+(?= GiB))", paragraph.partition(" KB")[2])
    ]
    tokens, sizes = numbers[::2], numbers[1::2]
    assert len(sizes) == 4
    assert [step_tokens(None, SHAPE, size * GIB) for size in sizes] == tokens
    assert step_tokens(None, SHAPE, (sizes[0] - 1) * GIB) < tokens[0]
