"""A prompt's log-probabilities: computed, held and written once for all choices of it, beside the streams."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import orjson
import pytest

from moeserve.config import ServerConfig
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.httpserver.generation.engine.prompt_scores import PromptScores
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.openai.completion_body import CompletionRequest
from moeserve.httpserver.openai.completion_logprobs import (
    CompletionLogprobsWriter,
    EchoedLogprobs,
    TextOffsets,
)
from moeserve.httpserver.openai.completions import ChoiceWriter, CompletionHandler, Echo
from moeserve.messages.sampling import SamplingParams, TextOptions, TokenLogprob
from moeserve.messages.schema import GenerateBatch, GenerateRequest, TextItem, TextOut, Usage
from moeserve.messages.steps import WorkerReady
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import TINY_MODEL
from tests.support.servers.engine_messages import logprobs_of

PROMPT = list(range(20, 1020))
SCORES = [logprobs_of(token_id, 3) for token_id in PROMPT[1:]]


class Text:
    """The text of a vocabulary in which a token's text is its number. It notes who asks."""

    def __init__(self) -> None:
        self.threads: set[threading.Thread] = set()
        self.asked = 0  # times

    def token_bytes(self, token_id: int) -> bytes:
        return f" {token_id}".encode()

    def is_special(self, token_id: int) -> bool:
        return False

    def token_text(self, token_id: int) -> str:
        self.threads.add(threading.current_thread())
        self.asked += 1
        return f" {token_id}"


def writers(text: Text, choices: int, **body: Any) -> list[ChoiceWriter]:
    asked = CompletionRequest(prompt=PROMPT, echo=True, logprobs=3, n=choices, **body)
    echo = Echo(PROMPT, "the prompt")
    return [ChoiceWriter(text, asked, echo) for _ in range(choices)]  # type: ignore[arg-type]


def item(id: int, **fields: Any) -> TextItem:
    return TextItem(id, "", [], **fields)


def test_the_other_choices_get_the_same_objects_before_their_own() -> None:
    def request(id: int, prompt_logprobs: int | None) -> GenerateRequest:
        sampling = SamplingParams(max_tokens=4, prompt_logprobs=prompt_logprobs)
        return GenerateRequest(id, bytes(4 * len(PROMPT)), sampling, TextOptions(), 0.0)

    scores = PromptScores([request(1, 3), request(2, None), request(3, None), request(4, 3)])
    first, second = item(1, prompt_logprobs=SCORES[:400]), item(1, prompt_logprobs=SCORES[400:])
    early, own = item(2, progress=None), item(1)
    assert scores.given_out(1, early) == []
    passed = scores.given_out(0, first)
    assert [index for index, _ in passed] == [0, 1, 2]
    assert all(one.prompt_logprobs is first.prompt_logprobs for _, one in passed)
    assert [index for index, _ in scores.given_out(0, second)] == [0, 1, 2, 1]
    assert scores.given_out(0, own) == [(0, own)]
    assert scores.given_out(2, own) == [(2, own)]
    assert scores.given_out(3, own) == [(3, own)]  # another prompt, which is not scored yet


def test_what_is_written_of_a_prompt_is_written_once_for_all_choices() -> None:
    def asked(choices: int, *, whole: bool) -> int:
        text = Text()
        for writer in writers(text, choices):
            if whole:
                writer.whole([item(1, prompt_logprobs=SCORES)])
            else:
                writer.write(item(1, prompt_logprobs=SCORES))
        return text.asked

    assert asked(16, whole=True) == asked(1, whole=True)
    assert asked(16, whole=False) < 1.1 * asked(1, whole=False)


def test_json_of_a_prompt_and_an_answer() -> None:
    def written() -> CompletionLogprobsWriter:
        text: Any = Text()
        return CompletionLogprobsWriter(text, 3, False, TextOffsets(text, skips_special=False))

    answer = [TokenLogprob(7, -0.25, 1, (7, 8), (-0.25, float("-inf")))]
    writer, other = written(), written()
    expected = other.first_prompt_token(PROMPT[0])
    for part in (other.write(SCORES), other.write(answer)):
        for name, entries in part.items():
            expected[name] += entries  # type: ignore[literal-required]
    echoed = EchoedLogprobs(writer, PROMPT[0], SCORES)
    assert orjson.loads(orjson.dumps(echoed.followed_by(writer, answer))) == expected
    alone = orjson.loads(orjson.dumps(echoed.followed_by(writer, [])))
    assert alone["tokens"] == expected["tokens"][:-1]


class Engine(EngineClient):
    """Which answers at once."""

    def __init__(self) -> None:
        ready = WorkerReady(1 << 16, 8, 1 << 12, 1 << 12, 0, 0, "a test")
        super().__init__(None, None, Metrics("m"), state=EngineState(True, ready=ready))  # type: ignore[arg-type]
        self.to_router = self  # type: ignore[assignment]

    async def send(self, message: object) -> None:
        assert isinstance(message, GenerateBatch)
        usage = Usage(len(PROMPT), 0, 0, 0.0, 0.0, 0.0)
        for request in message.unpacked():
            scores = SCORES if request.sampling.prompt_logprobs is not None else None
            self._dispatch(TextOut([item(request.id, prompt_logprobs=scores)]))
            self._dispatch(TextOut([item(request.id, finish_reason="length", usage=usage)]))


def test_whole_answers_are_written_on_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that streams go on meanwhile."""
    text, engine = Text(), Engine()
    service = Service(ServerConfig(model="m"), "m", engine, engine.metrics, {})
    tokenizer = TextTokenizer.from_gguf(open_gguf(TINY_MODEL))
    service.text = ModelText(tokenizer, None, None, None, 100, True, None)  # type: ignore[arg-type]
    monkeypatch.setattr(ModelText, "token_text", lambda _, token_id: text.token_text(token_id))

    def answer(**more: Any) -> list[dict[str, Any]]:
        body = CompletionRequest(model="m", prompt=PROMPT, max_tokens=0, n=3, **more)
        whole = asyncio.run(CompletionHandler(service, body, "x", Caller(time.monotonic())).whole())
        choices: list[dict[str, Any]] = orjson.loads(orjson.dumps(whole))["choices"]
        return choices

    assert [len(choice["logprobs"]["tokens"]) for choice in answer(echo=True, logprobs=2)] == [1000] * 3
    assert [len(choice["prompt_logprobs"]) for choice in answer(echo=True, prompt_logprobs=2)] == [1000] * 3
    assert text.asked
    assert threading.main_thread() not in text.threads
