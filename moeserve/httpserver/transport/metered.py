"""Metered: an awaitable that tells how much CPU time the event loop's thread spends in each step of another one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Metered(Generic[T]):
    """`await Metered(steps, charge)` gives what `steps` gives. What runs meanwhile in other tasks, in threads or in
    other processes does not count."""

    def __init__(self, steps: Generator[Any, Any, T], charge: Callable[[float], None]) -> None:
        """`steps`: an awaitable's `__await__()`. `charge` is called after each step, with its seconds of CPU time."""
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
