"""Guides and their masks as the worker's step loop drives them, with the real sampler and random logits."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest

from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.spec import Choice, Ebnf, GrammarTool, ToolCalls
from moeserve.grammar.translate import to_grammar
from moeserve.messages.reasoning import Thinking
from moeserve.messages.sampling import SamplingParams
from moeserve.worker.constraints.guide import Guide
from tests.support.worker.constrained_rows import (
    CLOSE,
    ENDING,
    EOS,
    OPEN,
    SCHEMA,
    SLOTS,
    TOKENIZER,
    World,
    params,
)


def thinking(is_open: bool, budget: int | None = None) -> Thinking:
    return Thinking(OPEN, CLOSE, ENDING, is_open, budget)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.constraints.close()


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


def test_no_second_tag_closes_a_thought_that_was_cut_short(world: World) -> None:
    """A model that goes on thinking would close its thought once more, among the answer's text."""
    for budget in (0, 3):
        world.bind(0, params(grammar="", thought=thinking(is_open=True, budget=budget)))
        output = [world.step(0, prefer=(100,))[0][0] for _ in range(budget + len(ENDING))]
        assert output == [100] * budget + list(ENDING)
        assert CLOSE not in [world.step(0, prefer=(CLOSE, 100))[0][0] for _ in range(9)]


def test_a_call_of_the_grammar_ends_a_thought(world: World) -> None:
    (call,) = TOKENIZER.encode("<tool_call>")
    thought = Thinking(OPEN, CLOSE, ENDING, is_open=True, call_token=call)
    tools = ToolCalls(
        [GrammarTool("now", '{"type": "object", "additionalProperties": false}')], parallel=False
    )
    world.bind(0, params(grammar=to_grammar(tools), thought=thought))
    assert [world.step(0, prefer=(100,))[0][0] for _ in range(3)] == [100] * 3
    assert world.step(0, prefer=(call,))[0] == [call]
    text = TOKENIZER.decode(world.run(0), skip_special=False)
    assert "".join(text.split()) == '{"name":"now","arguments":{}}</tool_call>'


def test_a_call_whose_token_is_not_the_first_of_its_tag_ends_a_thought(world: World) -> None:
    """DeepSeek-V4's tags have their token after a `<`."""
    (lead,), (call,) = TOKENIZER.encode("<"), TOKENIZER.encode("x")
    thought = Thinking(OPEN, CLOSE, ENDING, is_open=True, call_token=call, call_lead=lead)
    world.bind(0, params(grammar=to_grammar(Choice(["<x!"])), thought=thought))
    written = (call, lead, 100, call, lead)
    assert [world.step(0, prefer=(token,))[0][0] for token in written] == [*written]
    assert world.step(0, prefer=(call,))[0] == [call]
    assert TOKENIZER.decode(world.run(0)) == "!"


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
