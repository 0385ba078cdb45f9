"""Calls that Qwen3.5 to 3.8 wrote, from public reports; the names of tools and arguments are the tests'. Each is read
whole, character by character, and cut in two."""

from __future__ import annotations

from typing import Final

import pytest

from tests.support.chats.chat_events import Answer
from tests.support.chats.written_answers import read

OPEN: Final = "<tool_call>\n<function=f>\n<parameter=a>\n"
CLOSE: Final = "\n</parameter>\n</function>\n</tool_call>"
EMBEDDED: Final = (
    "python3 - <<'PY'\npattern = r'<parameter=edits>\\n(.*?)\\n</parameter>'\nprint(pattern)\nPY"
)

# Report -> what the model wrote, and the arguments that are meant.
WRITTEN: Final = {
    "antirez/ds4#1050": (  # 5 of 98 calls
        "<tool_call>\n<parameter=f>\n<parameter=a>\nls\n</parameter>\n</function>\n</tool_call>",
        {"a": "ls"},
    ),
    "QwenLM/Qwen3.8#178": (
        f"{OPEN}x\n</parameter>\n</function>\n</function>\n</function_invocation>\n</tool_call>",
        {"a": "x"},
    ),
    "QwenLM/Qwen3.8#125": (
        '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>',
        {"a": "x"},
    ),
    "Neroued/ninfer#138": (OPEN + EMBEDDED + CLOSE, {"a": EMBEDDED}),
    "ollama/ollama#16686": (OPEN.removeprefix("<tool_call>\n") + "/a/file.md" + CLOSE, {"a": "/a/file.md"}),
    "ollama/ollama#17914": (f"{OPEN}x\n</function>\n</tool_call>", {"a": "x"}),
    "raullenchai/Rapid-MLX#1515": (
        f"{OPEN}A block ends with </parameter>, a call with </tool_call> on its own.{CLOSE}",
        {"a": "A block ends with </parameter>, a call with </tool_call> on its own."},
    ),
    "anomalyco/opencode#6918": (
        f"{OPEN}one\n</parameter>\n<parameter=b>\nz\n</parameter>\n<parameter=a>\none{CLOSE}",
        {"a": "one", "b": "z"},
    ),
    "sgl-project/sglang#27336": (
        f"{OPEN}Shanghai\n</parameter\n</function>\n</tool_call>",
        {"a": "Shanghai"},
    ),
}


@pytest.mark.parametrize("report", WRITTEN)
def test_a_call_is_read_as_it_is_meant(report: str) -> None:
    written, arguments = WRITTEN[report]
    assert read("qwen3_coder", written) == Answer("", "", [("f", arguments)])


def test_a_call_behind_prose_without_its_opening_tag() -> None:
    """ollama/ollama#18530."""
    written = "I will look.\n\n" + OPEN.removeprefix("<tool_call>\n") + "*" + CLOSE
    assert read("qwen3_coder", written) == Answer("I will look.", "", [("f", {"a": "*"})])


def test_a_call_within_reasoning() -> None:
    """lmstudio-ai/lmstudio-bug-tracker#2045."""
    written = f"I need to look.\n{OPEN}x{CLOSE}"
    assert read("qwen3_coder", written, is_open=True) == Answer("", "I need to look.", [("f", {"a": "x"})])


def test_a_key_in_the_place_of_the_name_is_text_if_no_tool_has_its_name() -> None:
    written = "<tool_call>\n<parameter=a>\nls\n</parameter>\n</function>\n</tool_call>"
    assert read("qwen3_coder", written) == Answer(written, "", [])
