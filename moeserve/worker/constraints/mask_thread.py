"""The thread that computes masks. Urgent masks come first, in order of arrival. Between them it computes expensive
ones, one answer at a time, with tenants taking turns; so a cheap mask waits for at most one expensive one."""

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
    """The step loop calls and waits; any thread may call `later`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        with threads_with_stack(STACK_BYTES):
            self._thread.submit(int)  # makes the pool start its thread
        self._changed = threading.Condition()  # guards everything below
        self._awaited: GuidedAnswer | None = None
        self._later: OrderedDict[str, deque[_Asked]] = OrderedDict()  # by tenant; the next tenant first
        self._has_turn = False  # True while one call of `_take_turn` is scheduled
        self._error: BaseException | None = None

    def soon(self, answers: Sequence[tuple[GuidedAnswer, Work]]) -> None:
        """Computes masks that the next step needs. A mask that turns out to be expensive is moved to `later`."""
        self._thread.submit(self._do_all, [_Asked(*one) for one in answers])

    def later(self, answer: GuidedAnswer, work: Work) -> None:
        with self._changed:
            self._later.setdefault(answer.tenant, deque()).append(_Asked(answer, work))
            if not self._has_turn:
                self._has_turn = True
                self._thread.submit(self._take_turn)

    def wait(self, answer: GuidedAnswer, timeout: float | None) -> bool:
        """Waits up to `timeout` seconds. Returns whether the answer's next token is known. Raises any exception of
        the thread."""
        if answer.known is None:
            with self._changed:
                self._awaited = answer
                self._changed.wait_for(lambda: answer.known is not None or self._error is not None, timeout)
                self._awaited = None
        if self._error is not None:
            raise self._error
        return answer.known is not None

    def close(self) -> None:
        """Ends the thread; pending `later` work is dropped."""
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
            if not queue:  # closed meanwhile
                return
            asked = queue.popleft()
            self._later.move_to_end(tenant)
            if not queue:
                del self._later[tenant]
        self._do(asked)
        with self._changed:
            self._has_turn = bool(self._later)
            if self._has_turn:
                self._thread.submit(self._take_turn)  # after urgent work

    def _do(self, asked: _Asked) -> None:
        if asked.answer.is_dropped:
            return
        try:
            known = asked.work()
        except BaseException as error:  # re-raised in the step loop
            with self._changed:
                self._error = error
                self._changed.notify_all()
            raise
        asked.answer.ms = known.ms
        asked.answer.known = known
        if self._awaited is asked.answer:
            with self._changed:
                self._changed.notify_all()
