"""Grammar specs, the checker's process and matchers, over the tiny model's vocabulary."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator

import jsonschema
import psutil
import pytest

from moeserve.grammar import check_process
from moeserve.grammar.check_process import MAX_CPU_S
from moeserve.grammar.check_protocol import Accepted, Refused
from moeserve.grammar.checker import GrammarChecker
from moeserve.grammar.engine import GrammarEngine, panics_as_errors
from moeserve.grammar.errors import GrammarError
from moeserve.grammar.spec import (
    ANY_OBJECT,
    Choice,
    Ebnf,
    GrammarSpec,
    GrammarTool,
    JsonOrToolCalls,
    JsonSchema,
    Regex,
    TextWithToolCalls,
    ToolCalls,
)
from moeserve.grammar.translate import to_grammar
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import TINY_MODEL
from tests.support.chats.grammar_texts import allowed, matches
from tests.support.servers.rpc_child import PanicException

SUM = GrammarTool(
    "sum",
    json.dumps(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }
    ),
)
NOW = GrammarTool("now", '{"type": "object", "properties": {}, "additionalProperties": false}')
CALL_SUM = '<tool_call>\n{"name": "sum", "arguments": {"a": 1, "b": -20}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def tokenizer() -> TextTokenizer:
    return TextTokenizer.from_gguf(open_gguf(TINY_MODEL))


@pytest.fixture(scope="module")
def engine(tokenizer: TextTokenizer) -> GrammarEngine:
    return GrammarEngine(tokenizer)


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker(TINY_MODEL)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (ANY_OBJECT, ['{}', '{"a": [1, {"b": null}]}', '{\n  "a": "é\\n"\n}'], ["[]", '{"a": 1', " {}", "{} "]),
        (JsonSchema('{"type": "integer", "minimum": 3, "maximum": 12}'), ["3", "12"], ["2", "13", "3.0"]),
        (JsonSchema("true"), ["null", '"x"'], ["nul"]),
        (Regex("[ab]{2,3}c?"), ["ab", "abac"], ["a", "abb ", "xab"]),
        (Choice(['yes "sir"', "no"]), ['yes "sir"', "no"], ["yes", "maybe"]),
        (Ebnf('start: "a"+ B\nB: /[0-9]{2}/'), ["aa12"], ["12", "a1"]),
        (Ebnf('root ::= "a" | x\nx ::= [b-d]{2}'), ["a", "bd"], ["b", "e"]),
        (ToolCalls([SUM, NOW], parallel=True), [CALL_SUM, f"{CALL_NOW}\n{CALL_SUM}"], ["hello", CALL_NOW[:-1]]),
        (ToolCalls([SUM], parallel=False), [CALL_SUM], [CALL_NOW, f"{CALL_SUM}\n{CALL_SUM}"]),
        (
            TextWithToolCalls([SUM, NOW], parallel=True),
            ["hello", f"Let me see.\n{CALL_SUM}", f"{CALL_SUM}\n{CALL_NOW}\nand so on", "a < b"],
            ["<tool_call>", CALL_NOW.replace("now", "never"), f"x {CALL_SUM.replace('-20', '2.5')}"],
        ),
        (
            JsonOrToolCalls('{"type": "boolean"}', [NOW], parallel=True),
            ["true", f"{CALL_NOW}\n{CALL_NOW}"],
            [f"true{CALL_NOW}", "hello"],
        ),
        (
            TextWithToolCalls([NOW], parallel=False),
            ["hello", f"Well: {CALL_NOW}"],
            [f"{CALL_NOW}{CALL_NOW}", f"{CALL_NOW} bye"],
        ),
    ],
)  # fmt: skip
def test_a_spec_is_matched_by_what_it_means(
    engine: GrammarEngine, tokenizer: TextTokenizer, spec: GrammarSpec, good: list[str], bad: list[str]
) -> None:
    for text in good:
        assert matches(engine, tokenizer, spec, text), text
    for text in bad:
        assert not matches(engine, tokenizer, spec, text), text


def test_at_its_end_only_end_tokens_may_come(engine: GrammarEngine, tokenizer: TextTokenizer) -> None:
    matcher = engine.matcher(to_grammar(Choice(["ab"])))
    for token_id in tokenizer.encode("ab"):
        assert not allowed(engine, matcher) & set(engine.eos_ids)
        matcher.accept(token_id)
    assert allowed(engine, matcher) == set(engine.eos_ids)
    for _ in range(3):  # rows that the router had planned already
        matcher.accept(engine.eos_ids[0])
        assert allowed(engine, matcher) == set(engine.eos_ids)
    with pytest.raises(GrammarError, match="after the end"):
        matcher.accept(5)


def test_control_tokens_are_no_text(engine: GrammarEngine, tokenizer: TextTokenizer) -> None:
    matcher = engine.matcher(to_grammar(JsonSchema('{"type": "string"}')))
    matcher.accept(*tokenizer.encode('"'))
    possible = allowed(engine, matcher)
    assert not possible & tokenizer.vocabulary.special
    assert tokenizer.vocabulary.user_defined <= possible  # <think> and the like are


def test_what_is_forced_comes_in_the_models_own_tokens(
    engine: GrammarEngine, tokenizer: TextTokenizer
) -> None:
    text = "The quick brown fox <tool_call> jumps"
    matcher = engine.matcher(to_grammar(Choice([text])))
    for token_id in tokenizer.encode(text, parse_special=False):
        assert allowed(engine, matcher) == {token_id}
        matcher.accept(token_id)


def test_a_long_json_answer_of_random_tokens_validates(
    engine: GrammarEngine, tokenizer: TextTokenizer
) -> None:
    """Whatever a model prefers: uniform draws from the mask make valid JSON."""
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": ["a", "b", 3]}, "minItems": 1, "maxItems": 4},
            "size": {"type": "number", "minimum": -1, "maximum": 1},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
    rng = random.Random(3)
    for _ in range(20):
        matcher = engine.matcher(to_grammar(JsonSchema(json.dumps(schema))))
        output: list[int] = []
        while (token_id := rng.choice(sorted(allowed(engine, matcher)))) not in engine.eos_ids:
            matcher.accept(token_id)
            output.append(token_id)
        jsonschema.validate(json.loads(tokenizer.decode(output)), schema)


def check(checker: GrammarChecker, spec: GrammarSpec) -> str:
    return asyncio.run(checker.check(spec))


def processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [p for p in children if p.status() != "zombie" and p.cmdline()[:1] == ["moeserve: grammar"]]


def test_the_checker_gives_what_the_worker_compiles(checker: GrammarChecker, engine: GrammarEngine) -> None:
    for spec in (ANY_OBJECT, Regex("a+"), ToolCalls([SUM], parallel=False)):
        grammar = check(checker, spec)
        assert grammar == to_grammar(spec)
        engine.matcher(grammar)
    assert check(checker, ANY_OBJECT) == to_grammar(ANY_OBJECT)  # remembered
    assert len(processes()) == 1


@pytest.mark.parametrize(
    ("spec", "cause"),
    [
        (JsonSchema('{"type": "foo"}'), "foo"),
        (JsonSchema('{"type": "array", "uniqueItems": true}'), "uniqueItems"),
        (JsonSchema('{"$ref": "file:///etc/passwd"}'), "etc/passwd"),
        (JsonSchema('{"$ref": "http://127.0.0.1/"}'), "127.0.0.1"),
        (JsonSchema('{"properties": {"a": false}, "required": ["a"], "type": "object"}'), "nsatisfiable"),
        (JsonSchema('{"$ref": "#"}'), "no text fits it"),
        (JsonSchema('{"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}]}}}'), "no text fits it"),
        (JsonSchema('{"$ref": "#/$defs/missing"}'), "missing"),
        (JsonSchema('{"anyOf": []}'), "anyOf is empty"),
        (JsonSchema('{"anyOf": 5}'), "anyOf must be an array"),
        (Regex("("), "unclosed group"),
        (Ebnf("start: nothing"), "nothing"),
        (Ebnf("hello"), "Expected"),
        (Ebnf("root ::= (" * 2000), "GBNF"),
        (Ebnf("start: " + "(" * 20000), "nested"),
        (ToolCalls([GrammarTool("f", '{"type": "nothing"}')], parallel=False), "nothing"),
    ],
)  # fmt: skip
def test_a_wrong_spec_is_refused_with_its_cause(
    checker: GrammarChecker, spec: GrammarSpec, cause: str
) -> None:
    with pytest.raises(GrammarError) as caught:
        check(checker, spec)
    assert cause in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(("taken", "reply"), [(MAX_CPU_S, Accepted), (MAX_CPU_S + 0.01, Refused)])
def test_a_compilation_that_ends_but_takes_long_is_refused(
    engine: GrammarEngine, taken: float, reply: type[Accepted] | type[Refused]
) -> None:
    """By a clock that is told: how long a schema takes depends on the machine."""
    said = check_process.check(engine, ANY_OBJECT, iter((5.0, 5.0 + taken)).__next__)
    assert isinstance(said, reply)
    if isinstance(said, Refused):
        assert said.message == "is too complex: compiling it takes 0.31 s, more than 0.3 s"


def test_copies_of_a_compiled_grammar_do_not_share_a_state(
    engine: GrammarEngine, tokenizer: TextTokenizer
) -> None:
    grammar = to_grammar(JsonSchema('{"type": "array", "items": {"type": "integer"}}'))
    first, second = engine.matcher(grammar), engine.matcher(grammar)
    start = allowed(engine, second)
    for token_id in tokenizer.encode("[1, 2"):
        first.accept(token_id)
    assert allowed(engine, second) == start
    assert allowed(engine, engine.matcher(grammar)) == start
    for i in range(40):  # more than are kept
        engine.matcher(to_grammar(Choice([f"word {i}"])))
    assert allowed(engine, engine.matcher(grammar)) == start


def test_a_grammar_that_needs_a_lot_in_a_step_ends_in_an_error_soon(engine: GrammarEngine) -> None:
    """Within llguidance's limits: no step of it may hold up the requests beside it for long."""
    rng = random.Random(1)
    hostile: list[GrammarSpec] = [
        Regex("(.|b)*a(.|b){300}c"),
        Regex(r"\w{1000}\d{1000}"),
        Ebnf('start: a\na: a a a | a a | "x" | "xx" | /[a-z]*/'),
        Ebnf('start: ("a"~1000)~1000'),
        JsonSchema(json.dumps({"type": "string", "pattern": "(a{1,1000}){1,1000}"})),
    ]
    for spec in hostile:
        try:
            matcher = engine.matcher(to_grammar(spec))
            for _ in range(60):
                start = time.thread_time()
                possible = sorted(allowed(engine, matcher))
                assert time.thread_time() - start < 0.5  # 0.03 s at most when it was measured
                if possible == sorted(engine.eos_ids):
                    break
                matcher.accept(rng.choice([p for p in possible if p not in engine.eos_ids]))
        except GrammarError:
            continue


def test_a_panic_is_a_grammar_error() -> None:
    """PyO3's PanicException is no Exception: it would end the worker, and with it every answer."""
    with pytest.raises(GrammarError, match="llguidance failed: out of bounds"), panics_as_errors():
        raise PanicException("out of bounds")
    with pytest.raises(GrammarError, match="constructed; lower its repetitions"), panics_as_errors():
        raise PanicException("too many expressions constructed")
    with pytest.raises(KeyboardInterrupt), panics_as_errors():
        raise KeyboardInterrupt
