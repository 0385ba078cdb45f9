"""Whose masks a step waits for, and how long: others' answers must not wait for a grammar that takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from moeserve.grammar.engine import Bits
from moeserve.grammar.spec import Choice, Ebnf
from moeserve.grammar.translate import to_grammar
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import COSTLY_MASK_MS
from moeserve.worker.constraints import slot_guides as constraints
from moeserve.worker.constraints.guided_answer import GuidedAnswer, NextToken
from moeserve.worker.constraints.slot_guides import LEAST_WAIT_S, MASK_WAIT_S
from moeserve.worker.loading.load import load_runner
from tests.gpu.driver import Driver, small_config
from tests.support.worker.constrained_rows import (
    SLOTS,
    TOKENIZER,
    World,
    params,
)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.constraints.close()


def test_a_grammar_that_is_not_compiled_yet_does_not_hold_up_the_others() -> None:
    """Its request is late in every step until it is bound again, and then is as if it had come only now."""
    world = World(compilation_wait=0.0)
    compiler = world.constraints._compiler._thread
    yes = params(seed=6, grammar=to_grammar(Choice(["yes"])))
    world.bind(0, params(seed=5))
    world.wait(0)
    whole = world.run(0)
    world.bind(0, params(seed=5))
    world.wait(0)
    release = threading.Event()
    compiler.submit(release.wait)
    world.bind(1, yes)
    output = []
    for _ in range(4):
        output.append(world.step(0, 1)[0][0])
        assert world.verdicts.late == {1}
    release.set()
    output.append(world.step(0, 1)[0][0])
    assert world.verdicts.late == {1}  # what was sampled before is not its own
    assert output == whole[:5]
    world.bind(1, yes)
    world.wait(1)
    assert TOKENIZER.decode(world.run(1)) == "yes"
    assert world.run(0, output) == whole
    world.constraints.close()


class SlowGuide:
    """The guide of an answer: each of its masks waits until `gate` is set."""

    def __init__(self, answer: GuidedAnswer) -> None:
        assert answer._guide is not None
        self._fill, self.gate, self.fills = answer._guide.fill, threading.Event(), 0
        answer._guide.fill = self.fill  # type: ignore[method-assign]

    def fill(self, mask: Bits) -> bool:
        self.fills += 1
        assert self.gate.wait(30)
        return self._fill(mask)


def test_a_mask_that_takes_long_does_not_hold_up_the_others() -> None:
    """The rows that wait for one are late. When they are bound again they go on with what was begun."""
    world = World()
    for slot in range(SLOTS):
        world.bind(slot, params(seed=slot))
    whole = [world.run(slot) for slot in range(SLOTS)]
    for slot in range(SLOTS):
        world.bind(slot, params(seed=slot))
    outputs = [[token_id] for token_id in world.step(*range(SLOTS))[0]]
    for slot in range(SLOTS):
        world.wait(slot)
    slow = [SlowGuide(world.constraints._answers[slot]) for slot in (1, 2, 3)]
    second, _ = world.step(*range(SLOTS))  # now the thread is at the slow masks
    for output, token_id in zip(outputs, second, strict=True):
        output.append(token_id)
    world.wait(0)
    patient, world.constraints._mask_wait = world.constraints._mask_wait, 0.05
    third, failed = world.step(*range(SLOTS))
    world.constraints._mask_wait = patient
    assert (world.verdicts.late, failed) == ({1, 2, 3}, {})
    outputs[0].append(third[0])
    for guide in slow:
        guide.gate.set()
    for slot in (1, 2, 3):
        world.bind(slot, params(seed=slot), outputs[slot])
        world.wait(slot)
    assert [world.run(slot, output) for slot, output in enumerate(outputs)] == whole
    for slot, guide in zip((1, 2, 3), slow, strict=True):
        world.wait(slot)
        assert guide.fills == len(whole[slot]), "no mask was made twice"
    world.constraints.close()


def test_no_step_waits_twice_for_what_was_late() -> None:
    world = World(compilation_wait=0.02)
    release = threading.Event()
    world.constraints._compiler._thread.submit(release.wait)
    waits: list[float | None] = []
    wait = world.constraints._thread.wait

    def noted(answer: GuidedAnswer, timeout: float | None) -> bool:
        waits.append(timeout)
        return wait(answer, timeout)

    world.constraints._thread.wait = noted  # type: ignore[method-assign]
    for _ in range(3):
        world.bind(1, params())
        world.step(1)
        assert world.verdicts.late == {0}
    assert waits[0] is not None
    assert 0 < waits[0] <= 0.02
    assert waits[1:] == [0.0, 0.0]
    release.set()
    world.constraints.close()


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("slots", "mask_ms", "computed_s", "longest"),
    [
        ((0, 1, 2), 1.0, 0.02, 0.02),
        ((0, 1, 2), 1.0, 0.0, LEAST_WAIT_S),
        ((0, 1, 2), 1.0, 9.0, MASK_WAIT_S),
        ((1, 2), 1.0, 0.02, MASK_WAIT_S),  # nobody else is held up
        (
            (0, 1, 2),
            COSTLY_MASK_MS / 2,
            0.02,
            MASK_WAIT_S,
        ),  # the machine is busy, the grammar is not to blame
    ],
)
def test_beside_rows_that_are_ready_a_step_waits_no_longer_than_it_has_computed(
    monkeypatch: pytest.MonkeyPatch,
    slots: tuple[int, ...],
    mask_ms: float,
    computed_s: float,
    longest: float,
) -> None:
    """For all masks together."""
    world = World(mask_wait=MASK_WAIT_S)
    world.bind(0, SamplingParams(max_tokens=9))
    for slot in (1, 2):
        world.bind(slot, params(seed=slot))
        world.wait(slot)
    thread, clock, waits = world.constraints._thread, Clock(), []

    def never(answer: GuidedAnswer, timeout: float) -> bool:
        if answer.known is None:
            waits.append(timeout)
            clock.now += timeout
        return answer.known is not None

    for call in ("soon", "later"):
        monkeypatch.setattr(thread, call, lambda *_: None)
    world.step(0, 1, 2)  # nobody makes their next masks
    for slot in (1, 2):
        world.constraints._answers[slot].ms = mask_ms
    monkeypatch.setattr(thread, "wait", never)
    monkeypatch.setattr(constraints, "time", clock)
    world.step(*slots, computed_s=computed_s)
    assert world.verdicts.late == {row for row, slot in enumerate(slots) if slot}
    assert waits == pytest.approx([longest, 0.0])
    world.constraints.close()


def test_a_step_says_how_long_it_has_computed(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(load_runner(small_config(tiny_model, device="cpu", threads=1), lambda *_: None))
    runner = driver.runner
    told: list[float] = []
    forward_s = 0.05

    def forward(*arguments: Any, **more: Any) -> None:
        time.sleep(forward_s)
        plain(*arguments, **more)

    def masks_for(slots: constraints.Int32s, computed_s: float) -> None:
        told.append(computed_s)

    plain = runner.engine.forward
    monkeypatch.setattr(runner.engine, "forward", forward)
    monkeypatch.setattr(runner._constraints, "masks_for", masks_for)
    started = time.perf_counter()
    driver.generate(0, [5, 6, 7], 1, SamplingParams(max_tokens=1))
    assert forward_s <= told[0] < time.perf_counter() - started


def test_answers_that_were_late_and_do_not_come_back_leave_room_for_others() -> None:
    world = World(compilation_wait=0.0)
    release = threading.Event()
    world.constraints._compiler._thread.submit(release.wait)
    for number in range(5 * SLOTS):
        world.bind(number % SLOTS, params(grammar=to_grammar(Choice([f"yes {number}"]))))
        world.step(number % SLOTS)
    assert len(world.constraints._kept) == SLOTS
    release.set()
    world.bind(0, params(grammar=to_grammar(Choice(["no"]))))
    world.wait(0)
    assert TOKENIZER.decode(world.run(0)) == "no"
    world.constraints.close()


def test_a_mask_that_takes_long_is_told(world: World) -> None:
    """An ambiguous grammar: the longer the answer, the more ways there are to read it."""
    world.bind(0, SamplingParams(max_tokens=400, seed=1))
    world.bind(1, params(grammar=to_grammar(Ebnf('start: s\ns: s s | A |\nA: "a"'))))
    told: dict[int, float] = {}
    for _ in range(600):
        world.step(0, 1, prefer=tuple(TOKENIZER.encode("a")))
        told = world.verdicts.mask_ms
        if told.get(1, 0.0) > 20 * COSTLY_MASK_MS or world.verdicts.failed:
            break
    assert told.keys() == {1}
    assert told[1] > 20 * COSTLY_MASK_MS


def test_a_first_mask_that_takes_long_is_told_and_the_next_one_waits_its_turn(world: World) -> None:
    """Each mask of a text without any choice takes as long as all that is left of it."""
    later: list[GuidedAnswer] = []
    world.bind(0, params(grammar=to_grammar(Ebnf(f'start: "{"the fox runs " * 800}"'))))
    world.wait(0)
    take_turn = world.constraints._thread.later

    def noted(answer: GuidedAnswer, work: Callable[[], NextToken]) -> None:
        later.append(answer)
        take_turn(answer, work)

    world.constraints._thread.later = noted  # type: ignore[method-assign]
    world.step(0)
    assert world.verdicts.mask_ms[0] > COSTLY_MASK_MS
    assert later == [world.constraints._answers[0]]
