"""Grammars of Solar Open's answers, over a vocabulary in which its marks are control tokens."""

from __future__ import annotations

from typing import Any, Final

import pytest

from moeserve.chatformat import solar_open
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.relax import relaxed
from moeserve.grammar.spec import GrammarTool, JsonSchema, Messages
from moeserve.httpserver.generation.chat.chat_formats import formats_of
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.support.chats import grammar_texts
from tests.support.chats.chat_events import Answer
from tests.support.chats.solar_template import SOLAR, rendered_in_messages
from tests.support.models.family_vocabulary import write_family_model

F: Final = GrammarTool("f", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}')
CALL: Final = ("f", {"a": 1})
INTEGER: Final = JsonSchema('{"type": "integer"}')


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    path = write_family_model("solar_open", tmp_path_factory.mktemp("solar") / "model.gguf")
    return TextTokenizer.from_gguf(open_gguf(path))


def answered(thought: str, content: str, *calls: tuple[str, Any]) -> str:
    return rendered_in_messages(thought, content, [*calls])


HI, THOUGHT, CALLED = answered("", "Hi"), answered("hm", "Hi"), answered("", "", CALL)


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, [HI, THOUGHT], [CALLED, "Hi", answered("hm", "Hi", CALL)]),
        ({"max_reasoning": 2}, [HI, THOUGHT], [answered("hmm", "Hi")]),
        ({"max_reasoning": 0}, [HI], [THOUGHT]),
        (
            {"tools": [F]},
            [HI, THOUGHT, CALLED, answered("hm", "Hi", CALL, CALL)],
            [answered("", "", ("f", {"a": "x"})), answered("", "", ("g", {"a": 1}))],
        ),
        ({"tools": [F], "must_call": True}, [CALLED, answered("hm", "Hi", CALL)], [HI, THOUGHT]),
        ({"tools": [F], "parallel": False}, [HI, CALLED], [answered("", "", CALL, CALL)]),
        ({"answer": INTEGER}, [answered("hm", "12"), answered("", "12")], [HI, THOUGHT, CALLED]),
        ({"answer": INTEGER, "tools": [F]}, [answered("", "12"), CALLED], [HI, answered("", "", ("f", {}))]),
    ],
)
def test_answers(tokenizer: TextTokenizer, fields: dict[str, Any], good: list[str], bad: list[str]) -> None:
    formats = formats_of(ServerConfig(model=""), tokenizer, SOLAR)
    assert formats.solar is not None
    assert formats.names() == ("solar_open", "solar_open")
    spec, engine = Messages(dict(formats.solar.tokens), **fields), GrammarEngine(tokenizer)
    for text in good:
        assert grammar_texts.matches(engine, tokenizer, spec, text, parse_special=True), text
        parser = solar_open.parser("<|begin|>assistant", reads_calls=True)
        read = Answer.of(parser.push(text) + parser.finish(""))
        assert len(read.calls) == text.count("<|tool_call:begin|>")
        assert "<|" not in read.text + read.reasoning
    for text in bad:
        assert not grammar_texts.matches(engine, tokenizer, spec, text, parse_special=True), text
    assert bool(relaxed(spec, set())) == bool(spec.tools)


AGAIN: Final = "<|end|><|begin|>assistant"


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, [f"hm{AGAIN}{HI}", f"{AGAIN}{HI}"], ["hm", HI, THOUGHT, f"hm{AGAIN}{THOUGHT}"]),
        ({"max_reasoning": 0}, [f"{AGAIN}{HI}"], [f"hm{AGAIN}{HI}", HI]),
        ({"max_reasoning": 2}, [f"hm{AGAIN}{HI}"], [f"hmm{AGAIN}{HI}"]),
        ({"tools": [F], "must_call": True}, [f"hm{AGAIN}{CALLED}"], [CALLED, f"hm{AGAIN}{HI}"]),
        ({"answer": INTEGER}, [f"hm{AGAIN}{answered('', '12')}"], [answered("", "12"), f"hm{AGAIN}{HI}"]),
    ],
)
def test_answers_behind_a_prompt_that_begins_the_reasoning(
    tokenizer: TextTokenizer, fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """The grammar began at a message's header, so the answer's first token ended the reasoning's text."""
    formats = formats_of(ServerConfig(model=""), tokenizer, SOLAR)
    assert formats.solar is not None
    spec, engine = Messages(dict(formats.solar.tokens), "think", **fields), GrammarEngine(tokenizer)
    for text in good:
        assert grammar_texts.matches(engine, tokenizer, spec, text, parse_special=True), text
    for text in bad:
        assert not grammar_texts.matches(engine, tokenizer, spec, text, parse_special=True), text


def test_a_model_without_the_tokens_is_refused_by_name(tmp_path_factory: pytest.TempPathFactory) -> None:
    other = write_family_model("kimi_k3", tmp_path_factory.mktemp("other") / "model.gguf")
    with pytest.raises(
        ConfigError, match="--tool-call-parser solar_open: the model's vocabulary has no tokens <"
    ):
        formats_of(
            ServerConfig(model="", tool_call_parser="solar_open"),
            TextTokenizer.from_gguf(open_gguf(other)),
            "",
        )
