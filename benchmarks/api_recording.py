"""Records what a server answers to a fixed list of requests over every endpoint, and compares two recordings.

    python -m benchmarks.api_recording before.json
    python -m benchmarks.api_recording --compare before.json after.json

A change that only moves code leaves the recording equal to the byte. Whatever differs from run to run is replaced
before it is written: random ids by their order of appearance, times, rates and expert counts by a word. /metrics is
recorded without its values. Requests are sent one after the other, greedy or with a seed, so that answers and cached
tokens repeat.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.server import Server, running_server

MODEL = "recorded"
API_KEY = "a-key"
# Headers that say something of the API; the others are the transport's (date, connection) or depend on ids.
HEADERS = (
    *("allow", "cache-control", "content-disposition", "content-security-policy", "content-type"),
    *("request-id", "retry-after", "www-authenticate", "x-accel-buffering", "x-request-id"),
)
_IDS = re.compile(r"\b(resp|msg|rs|fc|item|call)_[0-9a-f]{24,}\b")
_TIMES = re.compile(
    r'("(?:created|created_at|completed_at|queue_ms|prefill_ms|decode_ms|time_ms'
    r'|prefill_tokens_per_second|decode_tokens_per_second)": ?)(?:-?[\d.]+(?:e-?\d+)?|null|"[\dT:.-]+Z")'
)
_COUNTS = re.compile(r'("counts": ?)\[\[.*?\]\]', re.DOTALL)
_SAMPLE = re.compile(r"^([a-zA-Z_:][^ ]*(?:\{.*\})?) [^ ]+$", re.MULTILINE)

CHAT: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 8,
    "temperature": 0,
    "chat_template_kwargs": {"enable_thinking": False},
}
COMPLETION: dict[str, Any] = {"prompt": "The quick brown fox", "max_tokens": 6, "temperature": 0}
RESPONSE: dict[str, Any] = {
    "input": "Say hello.",
    "max_output_tokens": 8,
    "temperature": 0,
    "reasoning": {"effort": "none"},
}
MESSAGE: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 8,
    "temperature": 0,
}
PARAMETERS: dict[str, Any] = {"max_new_tokens": 5}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: list[Any] = [{"type": "function", **FUNCTION}]
ANTHROPIC_TOOLS: list[Any] = [{"name": "weather", "description": "Of a city.", "input_schema": SCHEMA}]


@dataclass(frozen=True)
class Call:
    """One request. `{response:NAME}` in its path or body stands for the id that the call of that name was answered
    with."""

    name: str
    method: str
    path: str
    body: Any = None
    raw: bytes | None = None  # instead of `body`
    headers: Mapping[str, str] = field(default_factory=dict)


def _post(name: str, path: str, body: Any, **more: Any) -> Call:
    return Call(name, "POST", path, body | more if isinstance(body, dict) else body)


def completions() -> Iterator[Call]:
    path, stream = "/v1/completions", {"stream": True}
    yield _post("completion", path, COMPLETION)
    yield _post("completion, streamed", path, COMPLETION | stream)
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    yield _post("completion, usage in each chunk", path, COMPLETION | stream | usage)
    yield _post("completion, echo and logprobs", path, COMPLETION, echo=True, logprobs=2)
    scored = {"return_tokens_as_token_ids": True, "return_token_ids": True, "logprobs": 1, "echo": True}
    yield _post("completion, token ids, streamed", path, COMPLETION | stream | scored)
    yield _post("completion, prompts and choices", path, COMPLETION, prompt=["One", "Two"], n=2, seed=7)
    yield _post("completion, prompts of ids", path, COMPLETION, prompt=[[1, 2, 3], [4]])
    yield _post("completion, sampled", path, COMPLETION, temperature=0.8, top_k=20, top_p=0.9, seed=3)
    yield _post("completion, regex", path, COMPLETION, guided_regex="[0-9]{3}", max_tokens=20)
    yield _post(
        "completion, bias and stop token", path, COMPLETION, logit_bias={"7": 100}, stop_token_ids=[7]
    )
    yield _post("completion, stop string", path, COMPLETION, max_tokens=40, stop=["e"])
    yield _post("completion, two grammars", path, COMPLETION, guided_regex="a", guided_choice=["b"])
    yield _post("completion, unknown field", path, COMPLETION, colour="red")
    yield _post("completion, unsupported field", path, COMPLETION, suffix="end")
    yield _post("completion, out of range", path, COMPLETION, temperature=3)
    yield _post("completion, token id out of range", path, COMPLETION, prompt=[10**6])
    yield _post("completion, too long", path, COMPLETION, max_tokens=10**7)
    yield _post("completion, no prompt", path, {"max_tokens": 3})
    yield _post("completion, empty prompt", path, COMPLETION, prompt="")
    yield _post("completion, other model", path, COMPLETION, model="other")


def chat() -> Iterator[Call]:
    path, stream = "/v1/chat/completions", {"stream": True, "stream_options": {"include_usage": True}}
    yield _post("chat", path, CHAT)
    yield _post("chat, streamed", path, CHAT | stream)
    yield _post("chat, choices and logprobs", path, CHAT, n=2, logprobs=True, top_logprobs=2)
    yield _post("chat, logprobs, streamed", path, CHAT | stream, logprobs=True, top_logprobs=1)
    thinking = {"chat_template_kwargs": {}, "thinking_token_budget": 4, "max_tokens": 24}
    yield _post("chat, thinking", path, CHAT | thinking)
    yield _post("chat, thinking, streamed", path, CHAT | thinking | stream)
    hidden = {"include_reasoning": False}
    yield _post("chat, thinking, hidden", path, CHAT | thinking | hidden)
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    yield _post("chat, JSON schema", path, CHAT, response_format=form, max_tokens=40)
    call = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 90}
    yield _post("chat, tool call", path, CHAT | call)
    yield _post("chat, tool call, streamed", path, CHAT | call | stream)
    yield _post("chat, tools, none", path, CHAT, tools=TOOLS, tool_choice="none")
    yield _post("chat, tools, one call at most", path, CHAT, tools=TOOLS, parallel_tool_calls=False)
    turn = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Weather?"}]},
        {
            "role": "assistant",
            "tool_calls": [{"id": "c1", "function": {"name": "weather", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "Rain.", "tool_call_id": "c1"},
    ]
    yield _post("chat, a tool's result", path, CHAT, messages=turn, tools=TOOLS)
    yield _post("chat, progress", path, CHAT, stream=True, return_progress=True)
    yield _post("chat, bad schema", path, CHAT, guided_json={"type": "x"})
    yield _post("chat, no such tool", path, CHAT, tool_choice={"function": {"name": "now"}})
    yield _post("chat, an image", path, CHAT, messages=[{"role": "user", "content": [{"type": "image_url"}]}])
    yield _post("chat, min_tokens and a grammar", path, CHAT, guided_regex="a+", min_tokens=2)
    yield _post("chat, budgets that disagree", path, CHAT, reasoning_effort="low", thinking_token_budget=5)
    tool_choice = {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}
    yield _post("chat, a call and a grammar", path, CHAT | tool_choice)


def responses() -> Iterator[Call]:
    path, stream = "/v1/responses", {"stream": True}
    yield _post("response", path, RESPONSE, metadata={"a": "b"})
    following = {"previous_response_id": "{response:response}", "instructions": "Be brief."}
    yield _post("response, following", path, RESPONSE | following)
    yield _post("response, streamed", path, RESPONSE | stream | following)
    include = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    thinking = {"reasoning": {"effort": "minimal"}, "include": include, "top_logprobs": 1, "store": False}
    yield _post("response, thinking", path, RESPONSE | thinking)
    yield _post("response, thinking, streamed", path, RESPONSE | thinking | stream)
    call = {"tools": FLAT_TOOLS, "tool_choice": "required", "max_output_tokens": 90}
    yield _post("response, tool call", path, RESPONSE | call)
    yield _post("response, tool call, streamed", path, RESPONSE | call | stream)
    form = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA}}
    yield _post("response, JSON schema", path, RESPONSE, text=form, max_output_tokens=40)
    yield Call("response, read", "GET", "/v1/responses/{response:response}")
    yield Call(
        "response, its input", "GET", "/v1/responses/{response:response}/input_items?order=asc&limit=5"
    )
    yield Call("response, bad page", "GET", "/v1/responses/{response:response}/input_items?limit=0")
    yield Call("response, unknown query", "GET", "/v1/responses/{response:response}?colour=red")
    yield Call("response, deleted", "DELETE", "/v1/responses/{response:response}")
    yield Call("response, deleted twice", "DELETE", "/v1/responses/{response:response}")
    yield _post("response, following a deleted one", path, RESPONSE | following)
    yield _post("response, bad item", path, RESPONSE, input=[{"type": "image"}])
    yield _post("response, too long", path, RESPONSE, max_output_tokens=10**7)
    yield _post("response, input tokens", "/v1/responses/input_tokens", {"input": "Say hello."})


def messages() -> Iterator[Call]:
    path, stream = "/v1/messages", {"stream": True}
    yield _post("message", path, MESSAGE)
    yield _post("message, streamed", path, MESSAGE | stream)
    thinking = {"thinking": {"type": "enabled", "budget_tokens": 4}, "max_tokens": 24}
    yield _post("message, thinking", path, MESSAGE | thinking)
    yield _post("message, thinking, streamed", path, MESSAGE | thinking | stream)
    call = {"tools": ANTHROPIC_TOOLS, "tool_choice": {"type": "any"}, "max_tokens": 90}
    yield _post("message, tool call", path, MESSAGE | call)
    yield _post("message, tool call, streamed", path, MESSAGE | call | stream)
    yield _post("message, context too small", path, MESSAGE, max_tokens=10**7, stop_sequences=["e"])
    yield _post("message, bad field", path, MESSAGE, temperature=2)
    yield _post("message, other model", path, MESSAGE, model="other")
    yield _post(
        "message, tokens", "/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGE["messages"]}
    )
    yield Call("message, wrong method", "GET", path)
    yield Call("message, no such path", "GET", "/v1/messages/batches")


def lightllm() -> Iterator[Call]:
    yield _post("generate", "/generate", {"inputs": "The quick", "parameters": PARAMETERS})
    details = PARAMETERS | {"return_details": True, "n": 2, "do_sample": True, "seed": 5}
    yield _post("generate, details", "/generate", {"inputs": "The quick", "parameters": details})
    yield _post("generate, streamed", "/generate_stream", {"inputs": "The quick", "parameters": PARAMETERS})
    grammar = PARAMETERS | {"regular_constraint": "[ab]{4}", "max_new_tokens": 9}
    yield _post("generate, regex", "/generate_stream", {"inputs": "The quick", "parameters": grammar})
    yield _post("generate, choices, streamed", "/generate_stream", {"inputs": "a", "parameters": {"n": 2}})
    yield _post("generate, bad field", "/generate", {"inputs": "a", "parameters": {"top_k": 0}})


def native() -> Iterator[Call]:
    yield _post("tokenize", "/tokenize", {"prompt": "The quick brown fox", "return_token_strs": True})
    chat = {"messages": CHAT["messages"], "tools": TOOLS}
    yield _post("tokenize, messages", "/tokenize", chat)
    yield _post("tokenize, both", "/tokenize", chat | {"prompt": "a"})
    yield _post("detokenize", "/detokenize", {"tokens": [1, 2, 3, 300]})
    yield _post("detokenize, out of range", "/detokenize", {"tokens": [10**6]})
    for path in ("/health", "/v1/models", f"/v1/models/{MODEL}", "/v1/models/other", "/v1/experts"):
        yield Call(path, "GET", path)
    for path in (
        "/v1/experts/heat",
        "/metrics",
        "/openapi.json",
        "/",
        "/experts",
        "/web/api.js",
        "/web/none.js",
    ):
        yield Call(path, "GET", path)
    yield Call("HEAD /health", "HEAD", "/health")


def transport() -> Iterator[Call]:
    json_type = {"content-type": "application/json"}
    yield Call("no such path", "GET", "/v2/none")
    yield Call("path without /v1", "POST", "/chat/completions", CHAT)
    yield Call("path with two slashes", "POST", "/v1//completions", {})
    yield Call("wrong method", "PUT", "/v1/completions", COMPLETION)
    yield Call("not JSON", "POST", "/v1/completions", raw=b"{", headers=json_type)
    yield Call("no object", "POST", "/v1/messages", raw=b"[]", headers=json_type)
    yield Call("no content type", "POST", "/v1/completions", raw=b"{}")
    yield Call("body too large", "POST", "/v1/messages", raw=b" " * (33 << 20), headers=json_type)
    yield Call("unknown host", "GET", "/health", headers={"host": "evil.example"})
    yield Call("unknown host, message", "POST", "/v1/messages", MESSAGE, headers={"host": "evil.example"})


def with_keys() -> Iterator[Call]:
    """Of a server that asks for an API key."""
    bearer, own = {"authorization": f"Bearer {API_KEY}"}, {"x-api-key": API_KEY}
    yield Call("no key", "GET", "/v1/models")
    yield Call("no key, message", "POST", "/v1/messages", MESSAGE)
    yield Call("no key, open path", "GET", "/health")
    yield Call("no key, page", "GET", "/experts")
    yield Call("wrong key", "GET", "/v1/models", headers={"authorization": "Bearer none"})
    yield Call("bearer", "GET", "/v1/models", headers=bearer)
    yield Call("x-api-key", "POST", "/v1/messages", MESSAGE, headers=own)
    yield Call("response, with a key", "POST", "/v1/responses", RESPONSE, headers=bearer)


def all_calls() -> Iterator[Call]:
    """Of a server without keys."""
    for part in (completions, chat, responses, messages, lightllm, transport, native):
        yield from part()


class ResponseRecorder:
    """Sends calls to one server, one after the other, and keeps what came back."""

    def __init__(self, server: Server) -> None:
        self._client = httpx.Client(base_url=server.base_url, timeout=120, headers={"connection": "close"})
        self._response_ids: dict[str, str] = {}

    def record(self, place: int, call: Call) -> dict[str, Any]:
        """Status, headers and the text of the body, without what differs from run to run."""
        content = call.raw if call.body is None else self._filled(json.dumps(call.body)).encode()
        headers = {"x-request-id": f"recorded-{place}"} | dict(call.headers)
        if call.body is not None:
            headers["content-type"] = "application/json"
        path = self._filled(call.path)
        answer = self._client.request(call.method, path, content=content, headers=headers)
        if (found := re.search(r"\bresp_[0-9a-f]{24,}\b", answer.text)) is not None:
            self._response_ids[call.name] = found[0]
        shown = {name: answer.headers[name] for name in HEADERS if name in answer.headers}
        text = _samples(answer.text) if call.path == "/metrics" else answer.text
        lines = normalised(text).split("\n")
        return {"status": answer.status_code, "headers": shown, "body": lines}

    def _filled(self, text: str) -> str:
        return re.sub(r"\{response:(\w+)\}", lambda found: self._response_ids[found[1]], text)


def normalised(text: str) -> str:
    """The text without what differs from run to run; equal ids stay equal."""
    names: dict[str, str] = {}

    def name(found: re.Match[str]) -> str:
        return names.setdefault(found[0], f"{found[1]}_<{len(names)}>")

    return _COUNTS.sub(r"\1<counts>", _TIMES.sub(r"\1<time>", _IDS.sub(name, text)))


def _samples(text: str) -> str:
    """Prometheus text without its values; in order, as requests that overlap may end either way round."""
    return "\n".join(sorted(_SAMPLE.sub(r"\1", text).splitlines()))


def record() -> dict[str, Any]:
    """What both servers answer, by the calls' names."""
    found: dict[str, Any] = {}
    for flags, calls in (((), all_calls()), (("--api-key", API_KEY), with_keys())):
        with running_server(None, "--served-model-name", MODEL, "--seed", "1", *flags) as server:
            recorder = ResponseRecorder(server)
            for place, call in enumerate(calls):
                assert call.name not in found, call.name
                found[call.name] = recorder.record(place, call)
    return found


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> int:
    """Prints what differs; how many calls do."""
    differing = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    for name in differing:
        print(f"--- {name}")
        old, new = (json.dumps(side.get(name), indent=1).splitlines() for side in (before, after))
        for line in list(difflib.unified_diff(old, new, lineterm="", n=0))[2:]:
            print(f"    {line[:300]}")
    print(f"{len(differing)} of {len({**before, **after})} calls differ")
    return len(differing)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument(
        "--compare", action="store_true", help="compare two recordings; exit code 1 if they differ"
    )
    arguments = parser.parse_args()
    if arguments.compare:
        if len(arguments.files) != 2:
            parser.error("--compare takes two files")
        before, after = (json.loads(file.read_text()) for file in arguments.files)
        return 1 if compare(before, after) else 0
    if len(arguments.files) != 1:
        parser.error("a recording is one file")
    recorded = record()
    arguments.files[0].write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    print(f"{len(recorded)} answers recorded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
