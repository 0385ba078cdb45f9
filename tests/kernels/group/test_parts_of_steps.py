"""Which dummy steps the division of steps over several GPUs is chosen by."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: it sets up the interpreter)
from moeserve.worker.engines.gpu.measure.parts import choose_parts
from moeserve.worker.engines.gpu.steps.step_path import StepFacts
from moeserve.worker.engines.gpu.steps.step_paths import StepPaths

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def timed_prompts(max_model_len: int) -> list[int]:
    """Returns the sizes of the dummy prompts that an engine of SIZES times."""
    found: list[int] = []

    def prompt(n: int, streamed: float) -> Callable[[], None]:
        found.append(n)
        return lambda: None

    facts = StepFacts(SIZES, max_decode_size=0)
    engine: Any = SimpleNamespace(
        facts=facts,
        prompt_sizes=[size for size in SIZES if size > 8],
        paths=StepPaths(facts),
        dummy_steps=SimpleNamespace(prompt=prompt),
    )
    choose_parts(engine, max_model_len, lambda value: value)
    return sorted(set(found))


def test_no_dummy_prompt_is_longer_than_a_request() -> None:
    """It would read beyond the end of the slot table, where a GPU found an illegal address."""
    assert timed_prompts(200) == [16, 32, 64, 128]
    assert timed_prompts(4096) == [size for size in SIZES if size > 8]
