"""Guides and their masks as the worker's step loop drives them, with the real sampler and random logits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator

import jsonschema
import numpy as np
import pytest
import torch

from moeserve.grammar.engine import Bits, GrammarEngine
from moeserve.grammar.spec import Choice, Ebnf, JsonSchema
from moeserve.grammar.translate import to_grammar
from moeserve.messages.sampling import SamplingParams, Thinking
from moeserve.messages.steps import COSTLY_MASK_MS
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.constraints import Constraints
from moeserve.worker.guide import Guide
from moeserve.worker.guided_answer import GuidedAnswer, NextToken
from moeserve.worker.sampler import CpuSampler
from tests.conftest import TINY_MODEL

SLOTS = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMAR = to_grammar(JsonSchema(json.dumps(SCHEMA)))
TOKENIZER = TextTokenizer.from_gguf(open_gguf(TINY_MODEL))
VOCAB = TOKENIZER.vocabulary.size
EOS = TOKENIZER.vocabulary.eos_ids
(OPEN,) = TOKENIZER.encode("<think>")
(CLOSE,) = TOKENIZER.encode("</think>")
ENDING = tuple(TOKENIZER.encode("\n</think>\n\n"))
NONE = np.zeros(0, np.int32)


def thinking(is_open: bool, budget: int | None = None) -> Thinking:
    return Thinking(OPEN, CLOSE, ENDING, is_open, budget)


class World:
    """The part of the worker that samples: a step is a row of random logits for each slot given."""

    def __init__(self, compilation_wait: float = 60.0, mask_wait: float = 60.0) -> None:
        self.constraints = Constraints(SLOTS, lambda: GrammarEngine(TOKENIZER), compilation_wait, mask_wait)
        self.sampler = CpuSampler(SLOTS, VOCAB)

    def bind(self, slot: int, params: SamplingParams, output: list[int] | None = None) -> None:
        known = np.array(output or [], np.int32)
        self.sampler.bind(slot, params, NONE, known)
        self.constraints.bind(slot, params, known)

    def step(self, *slots: int, prefer: tuple[int, ...] = ()) -> tuple[list[int], dict[int, str]]:
        at = np.array(slots, np.int32)
        logits = torch.zeros(len(slots), VOCAB)
        logits[:, list(prefer)] = 50.0
        tokens, _ = self.sampler.sample(logits, at, self.constraints.masks_for(at))
        self.verdicts = self.constraints.verdicts(at)
        self.constraints.accept(at, tokens, self.verdicts)
        return tokens.tolist(), self.verdicts.failed

    def wait(self, slot: int) -> None:
        """Until it is known what may come next."""
        assert self.constraints._thread.wait(self.constraints._answers[slot], 30)

    def run(self, slot: int, output: list[int] | None = None, limit: int = 400) -> list[int]:
        """Until an end token comes."""
        output = list(output or [])
        while len(output) < limit:
            (token_id,), failed = self.step(slot)
            assert not failed
            if token_id in EOS:
                return output
            output.append(token_id)
        raise AssertionError("no end")


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.constraints.close()


def params(seed: int = 0, grammar: str = GRAMMAR, thought: Thinking | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=400, seed=seed, grammar=grammar, thinking=thought)


def validate(output: list[int]) -> None:
    jsonschema.validate(json.loads(TOKENIZER.decode(output)), SCHEMA)


def test_a_constrained_request_beside_others(world: World) -> None:
    world.bind(0, SamplingParams(max_tokens=400, seed=1))
    world.bind(1, params(seed=2))
    world.bind(2, SamplingParams(max_tokens=400, seed=1))
    world.bind(3, params(seed=4, grammar=to_grammar(Choice(["yes"]))))
    outputs: list[list[int]] = [[] for _ in range(SLOTS)]
    for _ in range(120):
        tokens, failed = world.step(0, 1, 2, 3)
        assert not failed
        for output, token_id in zip(outputs, tokens, strict=True):
            output.append(token_id)
    assert outputs[0] == outputs[2]  # who has no grammar draws as ever
    validate(outputs[1][: next(i for i, token_id in enumerate(outputs[1]) if token_id in EOS)])
    yes = TOKENIZER.encode("yes")
    assert outputs[3][: len(yes)] == yes
    assert set(outputs[3][len(yes) :]) <= set(EOS)


def test_a_paused_request_goes_on_as_if_it_had_not_stopped(world: World) -> None:
    for thought in (None, thinking(is_open=True, budget=6)):
        world.bind(0, params(seed=7, thought=thought))
        whole = world.run(0)
        for cut in range(0, len(whole), 5):
            world.bind(1, params(seed=7, thought=thought), whole[:cut])
            assert world.run(1, whole[:cut]) == whole


def test_a_slot_forgets_its_grammar(world: World) -> None:
    world.bind(0, params())
    world.step(0)
    world.bind(0, SamplingParams(max_tokens=9, seed=3))
    assert world.constraints.masks_for(np.zeros(1, np.int32)) is None


def test_a_grammar_that_fails_fails_its_request_alone(world: World) -> None:
    """Too many items for llguidance's limit, in the second step."""
    world.bind(0, params(grammar=to_grammar(Ebnf('start: "b" ("a"~1000000)~1000000'))))
    world.bind(1, params(seed=1))
    failures = []
    output = []
    for _ in range(5):
        tokens, failed = world.step(0, 1)
        failures.append(failed)
        output.append(tokens[1])
    assert any(failures)
    for failed in failures:
        assert failed.keys() <= {0}
    (cause,) = {cause for failed in failures for cause in failed.values()}
    assert "cannot be followed any further" in cause
    validate(world.run(1, output))


def test_a_grammar_that_does_not_compile_here_fails_its_request_alone(world: World) -> None:
    world.bind(0, params(grammar="start: ("))
    world.bind(1, params(seed=1))
    (_, token_id), failed = world.step(0, 1)
    assert failed.keys() == {0}
    validate(world.run(1, [token_id]))


def test_a_budget_of_thought_is_kept_and_its_end_is_forced(world: World) -> None:
    for budget in (0, 1, 5, 20):
        world.bind(0, params(grammar="", thought=thinking(is_open=True, budget=budget)))
        output = [world.step(0, prefer=(100,))[0][0] for _ in range(30)]
        assert output == ([100] * budget + list(ENDING) + [100] * 30)[:30]


def test_a_thought_that_ends_before_its_budget_is_left_alone(world: World) -> None:
    world.bind(0, params(grammar="", thought=thinking(is_open=True, budget=5)))
    assert world.step(0, prefer=(CLOSE,))[0] == [CLOSE]
    assert [world.step(0, prefer=(100,))[0][0] for _ in range(9)] == [100] * 9


def test_a_thought_that_the_model_opens_counts_from_there(world: World) -> None:
    world.bind(0, params(grammar="", thought=thinking(is_open=False, budget=3)))
    assert world.step(0, prefer=(OPEN,))[0] == [OPEN]
    output = [world.step(0, prefer=(100,))[0][0] for _ in range(8)]
    assert output == [100, 100, 100, *ENDING, 100, 100][: len(output)]
    world.bind(0, params(grammar="", thought=thinking(is_open=False, budget=3)))
    assert [world.step(0, prefer=(100,))[0][0] for _ in range(8)] == [100] * 8  # it did not think


def test_a_grammar_waits_for_the_end_of_the_thought(world: World) -> None:
    grammar = to_grammar(Choice(["yes"]))
    for is_open in (False, True):
        world.bind(0, params(grammar=grammar, thought=thinking(is_open)))
        output = [] if is_open else world.step(0, prefer=(OPEN,))[0]
        output += world.step(0, prefer=EOS)[0]  # not now
        assert output[-1] not in EOS
        output += world.step(0, prefer=(CLOSE,))[0]
        assert TOKENIZER.decode(world.run(0)) == "\n\nyes"
    world.bind(0, params(grammar=grammar, thought=thinking(is_open=False)))
    assert TOKENIZER.decode([t for t in world.run(0) if t != OPEN]).endswith("yes")


def test_an_answer_may_come_without_a_thought(world: World) -> None:
    world.bind(0, params(grammar=to_grammar(Choice(["yes"])), thought=thinking(is_open=False)))
    first = TOKENIZER.encode("yes")[0]
    assert world.step(0, prefer=(first,))[0] == [first]
    assert TOKENIZER.decode(world.run(0, [first])) == "yes"


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
        assert self.gate.wait(5)
        return self._fill(mask)


def test_a_mask_that_takes_long_does_not_hold_up_the_others() -> None:
    """The rows that wait for one are late. When they are bound again they go on with what was begun."""
    world = World(mask_wait=0.05)
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
    third, failed = world.step(*range(SLOTS))
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
    assert waits[0] > 0
    assert waits[1:] == [0.0, 0.0]
    release.set()
    world.constraints.close()


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


def test_a_guide_knows_where_it_is_from_the_tokens_alone() -> None:
    engine = GrammarEngine(TOKENIZER)
    script = [OPEN, 5, 6, 7, *ENDING, *TOKENIZER.encode("yes")]
    masks = []
    guide = Guide(engine.matcher(to_grammar(Choice(["yes"]))), thinking(is_open=False, budget=3), EOS)
    for token_id in script:
        mask = np.zeros(engine.words, np.int32)
        masks.append(mask if guide.fill(mask) else None)
        guide.accept(token_id)
    for cut, expected in enumerate(masks):
        again = Guide(engine.matcher(to_grammar(Choice(["yes"]))), thinking(is_open=False, budget=3), EOS)
        again.accept_all(script[:cut])
        mask = np.zeros(engine.words, np.int32)
        assert again.fill(mask) == (expected is not None)
        assert expected is None or mask.tolist() == expected.tolist()


def allowed_by(guide: Guide, engine: GrammarEngine) -> set[int] | None:
    """The tokens that may come next; None: all."""
    mask = np.zeros(engine.words, np.int32)
    if not guide.fill(mask):
        return None
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_bad_sequence_is_not_completed() -> None:
    engine = GrammarEngine(TOKENIZER)
    guide = Guide(None, None, EOS, ((5, 6, 7), (6, 8), (9, 9)))
    excluded = []
    for token_id in (5, 6, 6, 9, 5, 6):
        guide.accept(token_id)
        allowed = allowed_by(guide, engine)
        excluded.append(set() if allowed is None else set(range(20)) - allowed)
    assert excluded == [set(), {7, 8}, {8}, {9}, set(), {7, 8}]


def test_a_bad_sequence_gives_way_where_nothing_else_may_come() -> None:
    engine = GrammarEngine(TOKENIZER)
    first, *rest = TOKENIZER.encode("yes, extraordinarily")
    assert rest
    matcher = engine.matcher(to_grammar(Choice(["yes, extraordinarily"])))
    free = Guide(matcher, None, EOS)
    free.accept(first)
    only = allowed_by(free, engine)
    assert only is not None
    guide = Guide(
        engine.matcher(to_grammar(Choice(["yes, extraordinarily"]))),
        None,
        EOS,
        tuple((first, one) for one in only),
    )
    guide.accept(first)
    assert allowed_by(guide, engine) == only
