"""How well the model talks, on what it has not learnt from: before export in torch, and then through the server.

    python -m training.evaluate --weights model.pt --vocabulary vocabulary.gguf
    python -m training.evaluate --url http://127.0.0.1:8000        # a running server
    python -m training.evaluate --model model.gguf                 # starts one

Greedy. An answer counts only when it is right to the letter and ended by itself: the right text, or exactly the right
calls with exactly the right arguments.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, Final

import httpx

from moeserve.chatformat import events as e
from moeserve.chatformat.formats import TOOL_FORMATS
from moeserve.chatformat.output import OutputParser
from moeserve.chatformat.reasoning import ReasoningParser
from training.text import arithmetic, smalltalk
from training.text import words as w
from training.text.example import Example
from training.text.reading import reading
from training.text.tools import call_only, tool_use

MAX_TOKENS: Final = 160  # of a thought and its answer


@dataclass(frozen=True)
class Outcome:
    """What came, thought and text apart, calls as (name, arguments)."""

    thought: str
    text: str
    calls: tuple[tuple[str, Any], ...]
    stopped: bool  # by itself

    def is_right(self, wanted: Example) -> bool:
        calls = tuple((call.name, call.arguments) for call in wanted.calls)
        text = "" if wanted.calls else wanted.answer
        is_thought = bool(self.thought.strip()) != (wanted.enable_thinking is False)
        return self.stopped and self.calls == calls and self.text.strip() == text and is_thought


Answerer = Callable[[Sequence[Example]], list[Outcome]]


def suites(size: int) -> Iterator[tuple[str, list[Example]]]:
    """Each figure's name and examples, at most `size` of them; the same ones every time."""
    pairs = sorted(arithmetic.HELD_OUT)
    sums = [arithmetic.added("What is {a} + {b}?", a, b) for a, b in pairs]
    differences = [arithmetic.subtracted("What is {a} - {b}?", a, b) for a, b in pairs]
    worded = [arithmetic.added(Random(i).choice(arithmetic.ADD), a, b) for i, (a, b) in enumerate(pairs)]
    yield from _both("two-digit sums, pairs held out", sums, size)
    yield from _both("two-digit differences, pairs held out", differences, size)
    yield from _both("two-digit sums, pairs held out, any wording", worded, size)
    yield from _both("questions about a text", _draw("reading", reading, size), size)
    yield from _both(
        "questions about a text, names held out", _draw("names", _with_held_out_names, size), size
    )
    yield from _both(
        "tool calls, requests held out", _draw("tools", lambda rng: call_only(rng, False), size), size
    )
    yield from _both(
        "tool calls, tools held out", _draw("new tools", lambda rng: call_only(rng, True), size), size
    )
    yield from _both("any turn with tools", _draw("tool use", tool_use, size), size)
    yield from _both("what it cannot do", _draw("unknown", smalltalk.unknown, size), size)
    yield from _both("what it was told", _draw("told", smalltalk.told, size), size)
    yield from _both("words repeated", _draw("repeat", smalltalk.repeat, size), size)


def _with_held_out_names(rng: Random) -> Example:
    return reading(rng, lambda rng: rng.choice(w.HELD_OUT_NAMES), longest=8)


def _draw(name: str, kind: Callable[[Random], Example], size: int) -> list[Example]:
    return [kind(Random(f"evaluation/{name}/{i}")) for i in range(size)]


def _both(name: str, examples: list[Example], size: int) -> Iterator[tuple[str, list[Example]]]:
    if len(examples) > size:
        examples = Random(name).sample(examples, size)
    for is_thinking in (False, True):
        yield f"{name}{', thinking' if is_thinking else ''}", [thinking(one, is_thinking) for one in examples]


def thinking(one: Example, is_enabled: bool) -> Example:
    return replace(one, enable_thinking=is_enabled)


def of_weights(weights: Path, vocabulary: Path, device: str) -> Answerer:
    """Answers from torch."""
    from training.encode import Encoder
    from training.model import generate
    from training.train import load

    model, encoder = load(weights, device).eval(), Encoder.from_gguf(vocabulary)
    end = encoder.end

    def read(one: Example, ids: list[int]) -> Outcome:
        parser = OutputParser(
            ReasoningParser(False) if one.enable_thinking else None,
            TOOL_FORMATS["hermes"].parser({}) if one.tools else None,
        )
        return outcome_of([*parser.push(encoder.decode(ids)), *parser.finish()], len(ids) < MAX_TOKENS)

    def answer(examples: Sequence[Example]) -> list[Outcome]:
        prompts = [encoder.encode(one)[0] for one in examples]
        answers: list[list[int]] = []
        for first in range(0, len(prompts), 200):
            answers += generate(model, prompts[first : first + 200], end, MAX_TOKENS)
        return [read(one, ids) for one, ids in zip(examples, answers, strict=True)]

    return answer


def outcome_of(events: Sequence[Any], stopped: bool) -> Outcome:
    """From what `moeserve.chatformat` read."""
    thought = "".join(event.text for event in events if isinstance(event, e.Reasoning))
    text = "".join(event.text for event in events if isinstance(event, e.Text))
    names = {event.index: event.name for event in events if isinstance(event, e.CallStart)}
    arguments = {
        i: "".join(x.text for x in events if isinstance(x, e.CallArguments) and x.index == i) for i in names
    }
    is_whole = {event.index for event in events if isinstance(event, e.CallEnd)} == set(names)
    calls = tuple((names[i], json.loads(arguments[i])) for i in names) if is_whole else ()
    return Outcome(thought, text, calls, stopped)


def of_server(url: str, at_once: int = 16) -> Answerer:
    """Answers through the chat API."""
    client = httpx.Client(base_url=url, timeout=120)

    def ask(one: Example) -> Outcome:
        body = {
            "messages": [_for_api(message) for message in one.messages],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
            "chat_template_kwargs": {"enable_thinking": one.enable_thinking},
            **({"tools": list(one.tools)} if one.tools else {}),
        }
        response = client.post("/v1/chat/completions", json=body)
        response.raise_for_status()
        (choice,) = response.json()["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return Outcome(
            message.get("reasoning_content") or "",
            message.get("content") or "",
            tuple((call["name"], json.loads(call["arguments"])) for call in calls),
            choice["finish_reason"] in ("stop", "tool_calls"),
        )

    def answer(examples: Sequence[Example]) -> list[Outcome]:
        with ThreadPoolExecutor(at_once) as pool:
            return list(pool.map(ask, examples))

    return answer


def _for_api(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments as JSON text, every call and answer with an id."""
    if message["role"] == "tool":
        return {**message, "tool_call_id": "call"}
    if not message.get("tool_calls"):
        return message
    calls = [
        {
            "id": "call",
            "type": "function",
            "function": {**f, "arguments": json.dumps(f["arguments"], ensure_ascii=False)},
        }
        for f in (call["function"] for call in message["tool_calls"])
    ]
    return {**message, "tool_calls": calls}


def report(answer: Answerer, size: int, shown_mistakes: int) -> None:
    """A table, and under each row some of the mistakes."""
    print("| | right | of |\n|---|---|---|")
    for name, examples in suites(size):
        outcomes = answer(examples)
        pairs = zip(examples, outcomes, strict=True)
        wrong = [(one, outcome) for one, outcome in pairs if not outcome.is_right(one)]
        print(f"| {name} | {100 * (1 - len(wrong) / len(examples)):.1f}% | {len(examples)} |", flush=True)
        for one, outcome in wrong[:shown_mistakes]:
            said = " / ".join(message["content"] for message in one.messages)
            print(f"  asked: {said!r}\n  wanted: {one.completion!r}\n  got: {outcome}", flush=True)


@contextmanager
def answerer(arguments: argparse.Namespace) -> Iterator[Answerer]:
    if arguments.weights is not None:
        yield of_weights(arguments.weights, arguments.vocabulary, arguments.device)
    elif arguments.url is not None:
        yield of_server(arguments.url)
    else:
        from tests.support.servers.server import running_server

        with running_server(arguments.model) as server:
            yield of_server(server.base_url)


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of docs/results/.")
    parser.add_argument("--weights", type=Path, help="of training.train, with --vocabulary")
    parser.add_argument("--vocabulary", type=Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--url", help="a running server")
    parser.add_argument("--model", type=Path, help="a GGUF to serve; with nothing given the packaged one")
    parser.add_argument("--size", type=int, default=1000, help="examples of each kind, at most")
    parser.add_argument("--mistakes", type=int, default=0, help="how many to show of each kind")
    arguments = parser.parse_args()
    if (arguments.weights is None) != (arguments.vocabulary is None):
        parser.error("--weights and --vocabulary go together")
    with answerer(arguments) as answer:
        report(answer, arguments.size, arguments.mistakes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
