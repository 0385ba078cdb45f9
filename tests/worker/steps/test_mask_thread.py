"""In which order masks are made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from moeserve.messages.sampling import SamplingParams
from moeserve.worker.constraints.guided_answer import GuidedAnswer, NextToken
from moeserve.worker.constraints.mask_thread import MaskThread


class Thread:
    """A MaskThread that stands still until `release`; `order` has the names of what it has done since."""

    def __init__(self) -> None:
        self.masks = MaskThread()
        self.order: list[str] = []
        self._gate = threading.Event()
        self.masks.soon([(self.answer(), self._stand)])

    def answer(self, tenant: str = "") -> GuidedAnswer:
        return GuidedAnswer(SamplingParams(max_tokens=9), [], tenant, 0, None)

    def work(self, name: str) -> NextToken:
        self.order.append(name)
        return NextToken()

    def soon(self, *names: str) -> list[GuidedAnswer]:
        asked = [(self.answer(), partial(self.work, name)) for name in names]
        self.masks.soon(asked)
        return [answer for answer, _ in asked]

    def later(self, name: str, tenant: str) -> GuidedAnswer:
        answer = self.answer(tenant)
        self.masks.later(answer, partial(self.work, name))
        return answer

    def release(self, *last: GuidedAnswer) -> None:
        self._gate.set()
        for answer in last:
            assert self.masks.wait(answer, 10.0)

    def _stand(self) -> NextToken:
        assert self._gate.wait(30)
        return NextToken()


@pytest.fixture
def thread() -> Iterator[Thread]:
    made = Thread()
    yield made
    made.masks.close()


def test_what_is_wanted_soon_waits_for_one_that_may_take_long_and_tenants_take_turns(thread: Thread) -> None:
    thread.soon("a")
    last = [thread.later(name, "much") for name in ("b1", "b2", "b3")]
    last.append(thread.later("c", "little"))
    thread.soon("d")
    thread.release(*last)
    assert thread.order == ["a", "b1", "d", "c", "b2", "b3"]


def test_what_no_step_waits_for_any_more_lets_others_pass(thread: Thread) -> None:
    late, *_ = thread.soon("late", "in time")
    late.was_late = True
    thread.soon("the next step's")
    thread.release(late)
    assert thread.order == ["in time", "the next step's", "late"]


def test_nothing_is_done_for_one_that_has_left(thread: Thread) -> None:
    left, other = thread.soon("left", "other")
    left.is_dropped = True
    thread.release(other)
    assert thread.order == ["other"]


def test_an_answer_is_not_waited_for_beyond_its_time(thread: Thread) -> None:
    (answer,) = thread.soon("a")
    assert not thread.masks.wait(answer, 0.01)
    thread.release(answer)


def test_an_error_reaches_who_waits(thread: Thread) -> None:
    def fail() -> NextToken:
        raise ZeroDivisionError

    answer = thread.answer()
    thread.masks.soon([(answer, fail)])
    with pytest.raises(ZeroDivisionError):
        thread.release(answer)
