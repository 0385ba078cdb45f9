"""What a soak has seen: its faults, what each of them excuses, and the requests that none of them excuses.

A *fault* has a beginning and an end: at its end the server is whole again. A *loss* is a request that did not get its
whole answer: its connection ended, it was refused, or an error came. A fault that was under way at some time of a
request excuses the losses that the documentation names for it. A whole answer that differs from the undisturbed
server's is never excused.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import IO, Any, Final

import httpx

from tests.support.clients.streams import StreamError

GRACE_S: Final = 2.0  # after a fault's end, until everybody has heard that all is well
REMEMBERED: Final = 4096  # faults that have ended; more than any request lives through


class Loss(StrEnum):
    CONNECTION = "a connection that ended"
    ERROR = "an error in the stream or a 500"
    OVERLOADED = "a 503, overloaded"
    LOADING = "a 503, loading"
    UNRESPONSIVE = "a 503, unresponsive"
    OUT_OF_MEMORY = "a 503, out_of_memory"


@dataclass(slots=True)
class Fault:
    kind: str
    excuses: frozenset[Loss]
    begun: float  # seconds of the clock
    ended: float | None = None  # None: it is under way
    details: dict[str, Any] = field(default_factory=dict)

    def touches(self, since: float) -> bool:
        """Whether it was under way, or had just ended, at some time from `since` on."""
        return self.ended is None or self.ended + GRACE_S >= since


class Ledger:
    """`log` gets a line of JSON for each fault at its end, and for each request that was lost."""

    def __init__(self, log: IO[str] | None = None, clock: Any = time.perf_counter) -> None:
        self.clock = clock
        self.faults: Counter[str] = Counter()  # that have ended, by kind
        self.answered = 0
        self.excused: Counter[str] = Counter()  # by cause
        self.lost: list[str] = []
        self._log = log
        self._begun = clock()
        self._under_way: list[Fault] = []
        self._ended: deque[Fault] = deque(maxlen=REMEMBERED)

    @contextmanager
    def fault(self, kind: str, *excuses: Loss, **details: Any) -> Iterator[Fault]:
        """One fault, as long as the block lasts. More may be written into its `details` meanwhile."""
        fault = Fault(kind, frozenset(excuses), self.clock(), details=details)
        self._under_way.append(fault)
        try:
            yield fault
        finally:
            self._under_way.remove(fault)
            fault.ended = self.clock()
            self._ended.append(fault)
            self.faults[kind] += 1
            self._write(kind, fault.begun, seconds=round(fault.ended - fault.begun, 3), **fault.details)

    def answer(self, tokens: list[str], expected: list[str]) -> None:
        """A whole answer has come."""
        if tokens == expected:
            self.answered += 1
        else:
            same = next(
                (at for at, pair in enumerate(zip(tokens, expected, strict=False)) if len({*pair}) > 1), None
            )
            self.lose(
                f"another answer: {len(tokens)} tokens of {len(expected)}, the first other one at {same}"
            )

    def failure(self, since: float, error: Exception) -> None:
        """A request that was sent at `since` has failed now."""
        loss, text = read_failure(error)
        faults = [fault for fault in (*self._under_way, *reversed(self._ended)) if fault.touches(since)]
        cause = next((fault.kind for fault in faults if loss in fault.excuses), None)
        if cause is not None:
            self.excused[f"{loss}: {cause}"] += 1
        else:
            self.lose(f"{text}, during {sorted({fault.kind for fault in faults}) or 'no fault'}")

    def lose(self, text: str) -> None:
        self.lost.append(text)
        self._write("LOST", self.clock(), what=text)

    def _write(self, kind: str, at: float, **details: Any) -> None:
        if self._log is not None:
            line = {"at": round(at - self._begun, 3), "kind": kind, **details}
            self._log.write(json.dumps(line) + "\n")
            self._log.flush()


def read_failure(error: Exception) -> tuple[Loss | None, str]:
    """What a request was lost by, and its description; None: by nothing that any fault excuses."""
    text = f"{type(error).__name__}: {str(error)[:300]}"
    if isinstance(error, httpx.HTTPStatusError):
        status, code = error.response.status_code, code_of(error.response)
        text = f"status {status}, code {code}: {error.response.text[:300]}"
        if status == 503:
            return _REFUSALS.get(f"a 503, {code}"), text
        return (Loss.ERROR if status == 500 and code == "engine_error" else None), text
    if isinstance(error, httpx.TransportError | EOFError):
        return Loss.CONNECTION, text
    if isinstance(
        error, StreamError
    ):  # of a refusal, too, where it took longer than the status line may wait
        return _REFUSALS.get(f"a 503, {error.code}", Loss.ERROR), text
    if isinstance(error, RuntimeError):  # `_read_late`: an error event
        return Loss.ERROR, text
    return None, text


_REFUSALS: Final = {str(loss): loss for loss in Loss if loss.startswith("a 503")}


def code_of(response: httpx.Response) -> str | None:
    try:
        code = response.json()["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, str) else None
