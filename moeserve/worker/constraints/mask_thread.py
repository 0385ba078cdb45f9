"""The thread that makes masks. What a step will want soon goes first, in the order in which it was asked for. What may
take long is done in between, one answer at a time, and tenants take turns at it: so no cheap mask waits for more
than one costly one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from moeserve.grammar.engine import STACK_BYTES, threads_with_stack
from moeserve.worker.constraints.guided_answer import GuidedAnswer, NextToken

Work = Callable[[], NextToken]


class _Asked(NamedTuple):
    answer: GuidedAnswer
    work: Work


class MaskThread:
    """Asked and waited for by the step loop; `later` by any thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        with threads_with_stack(STACK_BYTES):
            self._thread.submit(int)  # it starts its thread
        self._changed = threading.Condition()  # guards all below
        self._awaited: GuidedAnswer | None = None
        self._later: OrderedDict[str, deque[_Asked]] = OrderedDict()  # by tenant, the next tenant first
        self._has_turn = False  # a call of `_take_turn` is submitted, and only one
        self._error: BaseException | None = None

    def soon(self, answers: Sequence[tuple[GuidedAnswer, Work]]) -> None:
        """Computes masks that are wanted soon. A mask that turns out to take long is computed later."""
        self._thread.submit(self._do_all, [_Asked(*one) for one in answers])

    def later(self, answer: GuidedAnswer, work: Work) -> None:
        with self._changed:
            self._later.setdefault(answer.tenant, deque()).append(_Asked(answer, work))
            if not self._has_turn:
                self._has_turn = True
                self._thread.submit(self._take_turn)

    def wait(self, answer: GuidedAnswer, timeout: float | None) -> bool:
        """Whether its next token is known within `timeout` seconds. Raises what has ended the work of any answer."""
        if answer.known is None:
            with self._changed:
                self._awaited = answer
                self._changed.wait_for(lambda: answer.known is not None or self._error is not None, timeout)
                self._awaited = None
        if self._error is not None:
            raise self._error
        return answer.known is not None

    def close(self) -> None:
        """Ends the thread; what was to be done later is not."""
        with self._changed:
            self._later.clear()
        self._thread.shutdown()

    # ---- all below runs on the thread

    def _do_all(self, asked: list[_Asked]) -> None:
        for one in asked:
            if one.answer.was_late:
                self.later(*one)
            else:
                self._do(one)

    def _take_turn(self) -> None:
        with self._changed:
            tenant, queue = next(iter(self._later.items()), ("", deque[_Asked]()))
            if not queue:  # closed
                return
            asked = queue.popleft()
            self._later.move_to_end(tenant)
            if not queue:
                del self._later[tenant]
        self._do(asked)
        with self._changed:
            self._has_turn = bool(self._later)
            if self._has_turn:
                self._thread.submit(self._take_turn)  # behind what is wanted sooner

    def _do(self, asked: _Asked) -> None:
        if asked.answer.is_dropped:
            return
        try:
            known = asked.work()
        except BaseException as error:  # for the step loop, which it ends
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise
        asked.answer.ms = known.ms
        asked.answer.known = known
        if self._awaited is asked.answer:
            with self._changed:
                self._changed.notify_all()
