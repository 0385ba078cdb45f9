"""The tokens with which a model ends its turn: within its reasoning they end the reasoning only, unless the client asks
otherwise (antirez/ds4#1087, sgl-project/sglang#37645). Stop strings count in the answer only."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from moeserve.detokenizer.manager import RequestText
from moeserve.messages.reasoning import EarlyEnd, Headers, is_open_after
from moeserve.messages.schema import GenerateRequest, TokensItem
from tests.support.chats.scripted_answers import MESSAGES, TOOLS
from tests.support.servers.family_server import serving
from tests.support.servers.http_harness import NAME, HttpServer, say

harmony = serving("harmony")
kimi = serving("kimi_k3")
glm = serving("glm45")

ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
TO_WEATHER = "<|channel|>commentary to=functions.weather<|message|>"
THINK_ENDS = "<|close|>think<|sep|>"
RESPONSE = "<|open|>response<|sep|>"


def asked(server: HttpServer, path: str = "/v1/chat/completions", **fields: Any) -> GenerateRequest:
    server.requests.clear()
    server.answer = say("x")
    body = {"model": NAME} | ({"messages": MESSAGES} if "chat" in path else {"prompt": "x"}) | fields
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return server.requests[-1]


def early_end(server: HttpServer) -> EarlyEnd:
    found = asked(server).early_end
    assert found is not None
    return found


def ending_after(server: HttpServer, text: str) -> str:
    """Returns what takes the place of the model's end token after this text."""
    found, tokenizer = early_end(server), server.tokenizer
    (end, *_) = found.token_ids
    output = array("i", tokenizer.encode_rest(text))
    return tokenizer.decode(list(found.ending(end, output)), skip_special=False)


def test_reasoning_between_tags(glm: HttpServer) -> None:
    for reasoning in ("<think>", "<think>Hm.\n"):
        assert ending_after(glm, reasoning) == "\n</think>\n\n"
    for answer in ("", "Hi", "<think>Hm</think>", "<think>Hm</think>Hi <think>", "<think>a<tool_call>b"):
        assert ending_after(glm, answer) == ("\n</think>\n\n" if "tool" in answer else "")
    with_tools = asked(glm, tools=TOOLS).early_end
    assert with_tools is not None
    output = array("i", glm.tokenizer.encode_rest("<think>a<tool_call>weather"))
    assert not is_open_after(with_tools.reasoning, output)  # a call is an answer


def test_reasoning_in_a_channel(harmony: HttpServer) -> None:
    after = f"<|end|><|start|>assistant{FINAL}"
    assert ending_after(harmony, f"{ANALYSIS}Hm") == after
    assert ending_after(harmony, f"{ANALYSIS}Hm<|end|><|start|>assistant{ANALYSIS}Well") == after
    for text in ("", f"{FINAL}Hi", f"{ANALYSIS}Hm<|end|>", f"{ANALYSIS}Hm<|end|><|start|>assistant{FINAL}"):
        assert ending_after(harmony, text) == ""
    assert ending_after(harmony, "<|channel|>analysis to=functions.weather<|message|>{}") == ""


def test_reasoning_in_a_section(kimi: HttpServer) -> None:
    assert ending_after(kimi, "") == ending_after(kimi, "Hm") == THINK_ENDS + RESPONSE
    for text in (f"Hm{THINK_ENDS}", f"Hm{THINK_ENDS}{RESPONSE}Hi", f"Hm{THINK_ENDS}<|open|>tools<|sep|>"):
        assert ending_after(kimi, text) == ""


def test_the_client_may_ask_otherwise(glm: HttpServer, harmony: HttpServer) -> None:
    ends = early_end(glm).token_ids
    assert asked(glm, n=3).early_end == early_end(glm)
    for fields in (
        {"separate_reasoning": False},
        {"ignore_eos": True, "max_tokens": 3},
        {"stop_token_ids": sorted(ends)},
        {"stop_token_ids": glm.tokenizer.encode("</think>")},
        {"use_beam_search": True, "n": 2, "temperature": 0, "max_tokens": 3},
        {"response_format": {"type": "json_object"}},  # a grammar excludes the token
    ):
        assert asked(glm, **fields).early_end is None, fields
    assert asked(glm, "/v1/completions").early_end is None
    assert asked(harmony, separate_reasoning=False).early_end is None


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            f"{ANALYSIS}a!b<|end|><|start|>assistant{FINAL}c!d",
            f"{ANALYSIS}a!b<|end|><|start|>assistant{FINAL}c",
        ),
        (f"{ANALYSIS}a final b<|end|><|start|>assistant{FINAL}c final d", None),
        (f"{FINAL}a!b", f"{FINAL}a"),
        (
            f"{ANALYSIS}a!<|end|><|start|>assistant{TO_WEATHER}a!",
            f"{ANALYSIS}a!<|end|><|start|>assistant{TO_WEATHER}a",
        ),
        ("a!b", "a"),
        # without <|message|>
        (
            f"{ANALYSIS}a!<|end|><|start|>assistant<|channel|>final b!c",
            f"{ANALYSIS}a!<|end|><|start|>assistant<|channel|>final b",
        ),
        (
            f"<|channel|>analysis a!b<|end|><|start|>assistant{FINAL}c!d",
            f"<|channel|>analysis a!b<|end|><|start|>assistant{FINAL}c",
        ),
        (
            '<|channel|>final <|constrain|>json{"a": "b!c"}',
            '<|channel|>final <|constrain|>json{"a": "b',
        ),
    ],
)
def test_stop_strings_behind_channels(harmony: HttpServer, text: str, shown: str | None, size: int) -> None:
    expected = text.rpartition(" final")[0] if shown is None else shown
    assert cut(harmony, text, ["!", " final"], size) == expected


@pytest.mark.parametrize("size", [1, 3, 100])
def test_stop_strings_behind_sections(kimi: HttpServer, size: int) -> None:
    begun = f"a! think b{THINK_ENDS}{RESPONSE}"
    assert cut(kimi, f"{begun}c!d", ["!", "think"], size) == f"{begun}c"
    assert cut(kimi, f"{begun}c think d", ["!", "think", "response"], size) == f"{begun}c "
    assert cut(kimi, f"{begun}c<|close|>response<|sep|>", ["<|close|>"], size) == "a! think b"


def cut(server: HttpServer, text: str, stop: list[str], size: int) -> str:
    """Returns the text up to a stop string, as the detokenizer finds it in steps of `size` tokens."""
    options = asked(server, stop=stop).text
    assert isinstance(options.reasoning, Headers)
    vocabulary = server.tokenizer.vocabulary
    request = RequestText(options, vocabulary.token_bytes, vocabulary.special)
    ids = server.tokenizer.encode_rest(text)
    shown = ""
    for at in range(0, len(ids), size):
        shown += request.take(TokensItem(1, ids[at : at + size])).text
        if request.stop_hit:
            return shown
    raise AssertionError("no stop string was found")
