"""An answer's events as a chat format reads them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from moeserve.chatformat.events import (
    CallArguments,
    CallBroken,
    CallEnd,
    CallStart,
    Event,
    Reasoning,
    Text,
)
from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.chatformat.output import AnswerParser, OutputParser, joined
from moeserve.chatformat.reasoning import ReasoningParser

SCHEMAS: dict[str, Any] = {
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "count": {"type": "integer"},
            "ratio": {"type": "number"},
            "exact": {"type": "boolean"},
            "filters": {"type": "object"},
            "tags": {"type": "array"},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "mode": {"enum": ["fast", 2, None]},
        },
    }
}
Make = Callable[[], AnswerParser]


def hermes(is_open: bool = False) -> OutputParser:
    return OutputParser(ReasoningParser(is_open), TOOL_FORMATS["hermes"].parser({}))


def coder() -> OutputParser:
    return OutputParser(None, TOOL_FORMATS["qwen3_coder"].parser(SCHEMAS))


def events_of(make: Make, pieces: list[str]) -> list[Event]:
    parser = make()
    events = [event for piece in pieces for event in parser.push(piece)]
    return joined(events + parser.finish())


@dataclass
class Answer:
    """What a client that waits for the whole answer makes of the events."""

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, events: list[Event]) -> Answer:
        answer = cls()
        arguments = ""
        name = ""
        for event in events:
            match event:
                case Text(text):
                    answer.text += text
                case Reasoning(text):
                    answer.reasoning += text
                case CallStart(_, name):
                    arguments = ""
                case CallArguments(_, text):
                    arguments += text
                case CallEnd():
                    answer.calls.append((name, json.loads(arguments)))
                case CallBroken(_, raw, _):
                    answer.text += raw
        return answer


def read(make: Make, text: str) -> Answer:
    return Answer.of(events_of(make, [text]))


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": "}</tool_call>\\""}]}}\n</tool_call>'


XML = """<tool_call>
<function=search>
<parameter=query>
two
 "lines" </parameter> <
</parameter>
<parameter=count>
7
</parameter>
<parameter=ratio>-2.5e1</parameter>
<parameter=exact>
True
</parameter>
<parameter=filters>
{"a": [null]}
</parameter>
<parameter=tags>
["x"]
</parameter>
<parameter=note>
null
</parameter>
<parameter=mode>
2
</parameter>
<parameter=other>
3
</parameter>
</function>
</tool_call>""".replace(' "lines" </parameter> <\n', ' "lines" </param> <\n')


def call_xml(**values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function=search>\n{parameters}</function>\n</tool_call>"
