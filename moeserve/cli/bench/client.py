"""Sends streamed requests to an OpenAI-compatible server and records their outcomes.

CPU time per token, measured with 64 streams of 50 tokens per second: aiohttp takes 28 us on uvloop and 45 us on
asyncio's own loop, httpx 59 us and 105 us. Each run reports its own value (`client_cpu_us_per_token`).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import orjson

from moeserve.cli.workload.metrics import Outcome

MAX_ERROR_CHARS = 500


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


_CHUNK = msgspec.json.Decoder(_Chunk)


@dataclass(slots=True)
class StreamedAnswer:
    """A streamed answer. `token_ids` is empty if the server was not asked for them or does not send them."""

    outcome: Outcome
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    status: int = 0  # HTTP status; 0: no answer


class Client:
    """Sends requests to one URL. Times are seconds since `start_clock`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, common: dict[str, Any]) -> None:
        """common: fields that every request's body has."""
        self._session = session
        self._url = url
        self._common = common | {"stream": True, "stream_options": {"include_usage": True}}
        self._zero = time.perf_counter()

    def start_clock(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self._zero

    async def ask(self, body: dict[str, Any], prompt_len: int) -> StreamedAnswer:
        """Sends a request and returns its outcome. A failure of server or network is an outcome too, not an exception.
        prompt_len: the expected number of prompt tokens; the server's count replaces it."""
        payload = orjson.dumps(self._common | body)
        answer = StreamedAnswer(Outcome(self.now(), prompt_len))
        try:
            async with self._session.post(self._url, data=payload) as response:
                answer.status = response.status
                if response.status == 200:
                    await self._read(response, answer)
                else:
                    text = await response.text()
                    answer.outcome.error = f"HTTP {response.status}: {text[:MAX_ERROR_CHARS]}"
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
            answer.outcome.error = f"{type(error).__name__}: {error}"
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: StreamedAnswer) -> None:
        """Reads all events. Pieces that arrive in one read get the same time."""
        pieces = Pieces(answer)
        rest = b""
        async for data in response.content.iter_any():
            now = self.now()
            *events, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
            for event in events:
                if event.startswith(b"data:") and (body := event[5:].strip()) != b"[DONE]":
                    pieces.take(_CHUNK.decode(body), now)
        pieces.finish(self.now())


class Pieces:
    """Turns the chunks of one answer into its outcome."""

    def __init__(self, answer: StreamedAnswer) -> None:
        self._answer = answer
        self._texts: list[str] = []
        self._first: float | None = None
        self._last = 0.0
        self._usage: _Usage | None = None

    def take(self, chunk: _Chunk, now: float) -> None:
        if chunk.usage is not None:
            self._usage = chunk.usage
        if bytes(chunk.error) not in (b"", b"null"):
            self._answer.outcome.error = bytes(chunk.error)[:MAX_ERROR_CHARS].decode(errors="replace")
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        if choice.token_ids:
            self._answer.token_ids += choice.token_ids
        if choice.delta is not None:
            self._texts.append(choice.delta.content or "")
            # A chat's first chunk (the role) and its last chunk have no token, and arrive together with a chunk that
            # has tokens. If they counted, as in vLLM's benchmark, they would add two gaps of zero to each answer.
            if not (choice.delta.content or choice.delta.reasoning_content or choice.delta.tool_calls):
                return
        else:
            self._texts.append(choice.text or "")
        self._token(now)

    def _token(self, now: float) -> None:
        if self._first is None:
            self._first = now
        else:
            self._answer.outcome.itls.append(now - self._last)
        self._last = now

    def finish(self, now: float) -> None:
        """Ends the outcome at the stream's end. If the answer's tokens have no text, such as half a character, the
        stream's end counts as their time."""
        outcome = self._answer.outcome
        self._answer.text = "".join(self._texts)
        if outcome.error:
            return
        if self._first is None and self._usage is not None and self._usage.completion_tokens > 0:
            self._token(now)
        if self._first is None:
            outcome.error = "the stream ended without a token"
            return
        outcome.ttft = self._first - outcome.sent
        outcome.latency = self._last - outcome.sent
        outcome.output_len = len(outcome.itls) + 1
        if self._usage is not None:
            outcome.output_len = self._usage.completion_tokens
            outcome.prompt_len = self._usage.prompt_tokens
            details = self._usage.prompt_tokens_details
            outcome.cached_tokens = (details.cached_tokens or 0) if details is not None else 0
