"""Metered: wraps an awaitable and measures the CPU time that the event loop's thread spends in each of its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Metered(Generic[T]):
    """`await Metered(steps, charge)` returns the result of `steps`. CPU time of other tasks, threads and processes does
    not count."""

    def __init__(self, steps: Generator[Any, Any, T], charge: Callable[[float], None]) -> None:
        """steps: an awaitable's `__await__()`. charge: called after each step with the step's seconds of CPU time."""
        self._steps = steps
        self._charge = charge

    def __await__(self) -> Metered[T]:
        return self

    def __iter__(self) -> Metered[T]:
        return self

    def __next__(self) -> Any:
        return self.send(None)

    def send(self, value: Any) -> Any:
        before = time.thread_time()
        try:
            return self._steps.send(value)
        finally:
            self._charge(time.thread_time() - before)

    def throw(self, *error: Any) -> Any:
        before = time.thread_time()
        try:
            return self._steps.throw(*error)
        finally:
            self._charge(time.thread_time() - before)

    def close(self) -> None:
        self._steps.close()
