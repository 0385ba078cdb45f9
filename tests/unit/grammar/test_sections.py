"""Grammars of Kimi-K3's answers, over a vocabulary in which its marks are control tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from moeserve.chatformat.kimi_k3 import KimiK3Parser
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.relax import relaxed
from moeserve.grammar.spec import ANY_OBJECT, GrammarTool, JsonSchema, Regex, Sections
from moeserve.httpserver.generation.chat.chat_formats import formats_of
from moeserve.httpserver.generation.chat.sections import Sections as SectionTokens
from moeserve.httpserver.generation.chat.tagged_arguments import with_tagged_arguments
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.support.chats import grammar_texts
from tests.support.chats.chat_events import Answer
from tests.support.chats.kimi_k3_template import KIMI_K3
from tests.support.models.family_vocabulary import write_family_model

SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "n": {"type": "integer"},
        "unit": {"enum": ["C", "F", None]},
        "short": {"type": "string", "maxLength": 3},
    },
    "required": ["a"],
    "additionalProperties": False,
}
PATTERN: Final = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^x+$"}},
    "required": ["a"],
}
ANY: Final = GrammarTool("any", ANY_OBJECT.schema)


def tool(schema: dict[str, Any], name: str = "f") -> GrammarTool:
    given = GrammarTool(name, json.dumps(schema))
    return (with_tagged_arguments([given], tags_say_type=True) or [given])[0]


F, IN_JSON = tool(SCHEMA), tool(PATTERN, "g")
NOW: Final = tool({"type": "object", "properties": {}, "additionalProperties": False}, "now")
A: Final = '[argument key="a" type="string"]x <b>[/argument]'
CALL: Final = f'[call tool="f" index="1"]{A}[/call]'
CALL_NOW: Final = '[call tool="now" index="2"][/call]'
CALL_JSON: Final = '[call tool="g" index="1"][json type="object"]{"a":"xx"}[/json][/call]'
CALL_ANY: Final = '[call tool="any" index="1"][argument key="k" type="number"]3[/argument]' + A + "[/call]"
HI: Final = "[response]Hi[/response]"
DONE: Final = "[/message]"
Matches = Callable[[Sections, str], bool]


def tags(short: str) -> str:
    return short.replace("[/", "<|close|>").replace("[", "<|open|>").replace("]", "<|sep|>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    return TextTokenizer.from_gguf(
        open_gguf(write_family_model("kimi_k3", tmp_path_factory.mktemp("k3") / "model.gguf"))
    )


@pytest.fixture(scope="module")
def tokens(tokenizer: TextTokenizer) -> dict[str, int]:
    formats = formats_of(ServerConfig(model=""), tokenizer, KIMI_K3)
    assert formats.sections is not None
    return dict(formats.sections.tokens)


@pytest.fixture(scope="module")
def matches(tokenizer: TextTokenizer, tokens: dict[str, int]) -> Matches:
    engine = GrammarEngine(tokenizer)

    def check(spec: Sections, text: str) -> bool:
        return grammar_texts.matches(engine, tokenizer, spec, tags(text), parse_special=True)

    return check


def calls(*texts: str) -> str:
    return f"[tools]{''.join(texts)}[/tools]{DONE}"


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({}, [f"hm[/think]{HI}{DONE}"], [HI + DONE, f"hm[/think]{HI}", f"hm[/think]{HI}{calls(CALL)}"]),
        ({"max_reasoning": 2}, [f"hm[/think]{HI}{DONE}"], [f"hmm[/think]{HI}{DONE}"]),
        ({"max_reasoning": 0}, [f"[/think]{HI}{DONE}"], [f"h[/think]{HI}{DONE}"]),
        ({"tools": [F]}, [f"hm[/think]{HI}{DONE}", f"hm[/think]{HI}{calls(CALL, CALL)}"], [calls(CALL)]),
        (
            {"tools": [F, NOW], "must_call": True},
            [f"hm[/think]{HI}{calls(CALL_NOW, CALL)}", f"[/think][response][/response]{calls(CALL)}"],
            [f"hm[/think]{HI}{DONE}", f"hm[/think]{HI}{calls()}", f"hm[/think]{HI}{calls(CALL_JSON)}"],
        ),
        (
            {"tools": [F, NOW], "must_call": True, "parallel": False, "begun": "response"},
            ["Hi[/response]" + calls(CALL), "[/response]" + calls(CALL_NOW)],
            ["Hi[/response]" + calls(CALL_NOW, CALL), f"hm[/think]{HI}{calls(CALL)}"],
        ),
        (
            {"tools": [IN_JSON, ANY], "begun": "response"},
            ["[/response]" + calls(CALL_JSON), "[/response]" + calls(CALL_ANY)],
            ["[/response]" + calls(CALL_JSON.replace("xx", "y"))],
        ),
        (
            {"begun": ""},
            [f'[message role="assistant"][think]hm[/think]{HI}{DONE}', f'[message role="assistant"]{HI}{DONE}'],
            [HI + DONE],
        ),
        (
            {"answer": JsonSchema('{"type": "integer"}')},
            [f"hm[/think][response]12[/response]{DONE}"],
            [f"hm[/think]{HI}{DONE}"],
        ),
        (
            {"answer": JsonSchema('{"type": "integer"}'), "tools": [F], "begun": "response"},
            [f"12[/response]{DONE}", f"[/response]{calls(CALL)}"],
            [f"Hi[/response]{DONE}", f"[/response]{DONE}", f"12[/response]{calls(CALL)}"],
        ),
        ({"answer": Regex("a/b+"), "begun": "response"}, [f"a/bb[/response]{DONE}"], [f"a/[/response]{DONE}"]),
    ],
)  # fmt: skip
def test_answers(
    matches: Matches, tokens: dict[str, int], fields: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    spec = Sections(tokens, **({"begun": "think"} | fields))
    for text in good:
        assert matches(spec, text), text
        begun = tags(f"[{spec.begun}]") if spec.begun else ""
        parser = KimiK3Parser(begun, reads_calls=True)
        read = Answer.of(parser.push(tags(text)) + parser.finish(""))
        assert len(read.calls) == text.count("[call")
        assert "<|" not in read.text + read.reasoning
    for text in bad:
        assert not matches(spec, text), text
    assert bool(relaxed(spec, set())) == bool(spec.tools)


@pytest.mark.parametrize(
    ("arguments", "is_good"),
    [
        ('[argument key="a" type="string"][/argument]', True),
        (A + '[argument key="n" type="number"]3[/argument]', True),
        (A + '[argument key="unit" type="string"]F[/argument]', True),
        (A + '[argument key="unit" type="null"]null[/argument]', True),
        (A + '[argument key="short" type="string"]abc[/argument]', True),
        ("", False),
        (A + A, False),
        (A + '[argument key="n" type="string"]3[/argument]', False),
        (A + '[argument key="n" type="number"]x[/argument]', False),
        (A + '[argument key="n" type="boolean"]3[/argument]', False),
        (A + '[argument key="unit" type="string"]K[/argument]', False),
        (A + '[argument key="short" type="string"]abcd[/argument]', False),
        (A + '[argument key="z" type="string"]x[/argument]', False),
        ('[json type="object"]{"a": "x"}[/json]', False),
    ],
)
def test_arguments(matches: Matches, tokens: dict[str, int], arguments: str, is_good: bool) -> None:
    spec = Sections(tokens, "response", tools=[F], must_call=True)
    text = f'[/response]{calls(f"""[call tool="f" index="1"]{arguments}[/call]""")}'
    assert matches(spec, text) == is_good


def test_flags_and_vocabularies(tokenizer: TextTokenizer) -> None:
    assert formats_of(ServerConfig(model=""), tokenizer, KIMI_K3).names() == ("kimi_k3", "kimi_k3")
    apart = ServerConfig(model="", tool_call_parser="none")
    assert formats_of(apart, tokenizer, KIMI_K3).names() == ("none", "kimi_k3")
    named = formats_of(ServerConfig(model="", reasoning_parser="kimi_k3"), tokenizer, "{{ messages }}")
    assert named.sections is not None
    assert named.names() == ("kimi_k3", "kimi_k3")
    assert named.channels is None
    with pytest.raises(ConfigError, match=r"--tool-call-parser harmony: .* no tokens"):
        formats_of(ServerConfig(model="", tool_call_parser="harmony"), tokenizer, KIMI_K3)


@pytest.mark.parametrize(
    ("prompt", "begun"),
    [
        ('[message role="assistant"][think]', "[think]"),
        ('[message role="user"]Hi[/message]<|end_of_msg|>', ""),
        ('[message role="assistant"][think][/think][response]The dog', "[response]The dog"),
        ("no tags", ""),
    ],
)
def test_what_the_prompt_has_begun(
    tokenizer: TextTokenizer, tokens: dict[str, int], prompt: str, begun: str
) -> None:
    ids = tokenizer.encode(tags(prompt))
    assert SectionTokens(tokens, True, True).prompt_end(tokenizer, ids) == tags(begun)
