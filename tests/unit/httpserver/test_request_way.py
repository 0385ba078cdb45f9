"""The way of a chat body to the engine's messages and back, walked with a real request.

A station is a call that hands the request on, in whatever form it has by then, to another module. The way returns where
it enters a module that it has left. docs/explanation/requests.md draws it.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import time
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import moeserve.httpserver
from moeserve.chatformat.events import CallStart, Reasoning, Text
from moeserve.config import ServerConfig
from moeserve.httpserver.generation.chat.chat_formats import formats_of
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.engine_state import EngineState
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt
from moeserve.httpserver.generation.request.caller import Caller
from moeserve.httpserver.generation.resolve.resolved import Resolved
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.observability.metrics import Metrics
from moeserve.httpserver.openai.chat import ChatHandler
from moeserve.httpserver.openai.chat_body import ChatCompletionRequest
from moeserve.messages.schema import GenerateRequest, TextItem, TextOut, Usage
from moeserve.messages.steps import WorkerReady
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.conftest import TINY_MODEL

ROOT = Path(moeserve.httpserver.__file__).parent
FORMS = (ChatCompletionRequest, Asked, ChatPrompt, Resolved, GenerateRequest, TextItem, TextOut)
EVENTS = (Text, Reasoning, CallStart)
ONCE = (
    inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
)  # a call, and each time they go on
MOST_RETURNS = 5
BODY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "max_tokens": 4,
    "stream": True,
    "reasoning_effort": "low",
    "tools": [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    ],
}
# The stations whose order says most; each is passed once.
WAY = [
    "openai.chat_body.asked",
    "generation.prepare.prepare",
    "generation.resolve.room.check_room",
    "generation.resolve.sampler.with_defaults",
    "generation.resolve.token_choice.token_choice",
    "generation.resolve.dry_breakers.breakers_of",
    "generation.chat.chat_prompt.encode",
    "generation.chat.answer_form.form_of",
    "generation.resolve.request_builder.build",
    "generation.engine.engine_client.submit",
    "generation.engine.open_generations.received",
    "generation.engine.delivery.put",
    "generation.chat.answers.read",
    "openai.chat_answer.delta",
]


class Router:
    """Both sockets of an engine that answers a request with one item."""

    def __init__(self) -> None:
        self._inbox: asyncio.Queue[TextOut] = asyncio.Queue()

    async def send(self, message: object) -> None:
        assert isinstance(message, GenerateRequest)
        usage = Usage(len(message.token_ids) // 4, 1, 0, 1.0, 1.0, 1.0)
        self._inbox.put_nowait(TextOut([TextItem(message.id, "Hi", [5], finish_reason="stop", usage=usage)]))

    async def recv(self) -> TextOut:
        return await self._inbox.get()


class Walk:
    """Notes the stations of what runs on this thread while it is open."""

    def __init__(self) -> None:
        self.stations: list[tuple[str, str]] = []  # module and function
        self._begun: list[FrameType] = []

    def __enter__(self) -> Walk:
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    @property
    def names(self) -> list[str]:
        return [f"{module}.{function}" for module, function in self.stations]

    @property
    def returns(self) -> list[str]:
        modules = [module for module, _ in self.stations]
        return [
            f"{module}.{function}"
            for at, (module, function) in enumerate(self.stations)
            if module in modules[:at] and modules[at - 1] != module
        ]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        module = _module(frame)
        if event != "call" or module is None or module.startswith("observability."):
            return
        code = frame.f_code
        if code.co_flags & ONCE:
            if any(frame is begun for begun in self._begun):
                return
            self._begun.append(frame)
        given = [frame.f_locals.get(name) for name in code.co_varnames[: code.co_argcount]]
        if not any(map(_hands_on, given)) or code.co_name.startswith("<") or _is_property(frame, given[0]):
            return
        outer = frame.f_back
        while outer is not None and _module(outer) is None:
            outer = outer.f_back
        if outer is None or _module(outer) != module:
            self.stations.append((module, code.co_name))


def _module(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    return ".".join(path.relative_to(ROOT).with_suffix("").parts) if path.is_relative_to(ROOT) else None


def _hands_on(value: object) -> bool:
    several = isinstance(value, list | tuple) and len(value) > 0
    return isinstance(value[0] if several else value, FORMS + EVENTS)  # type: ignore[index]


def _is_property(frame: FrameType, owner: object) -> bool:
    found = getattr(type(owner), frame.f_code.co_name, None)
    return isinstance(found, property | cached_property)


async def walked() -> tuple[Walk, list[Any]]:
    """A streamed chat request, from its validated body on."""
    gguf, router, config = open_gguf(TINY_MODEL), Router(), ServerConfig(model=str(TINY_MODEL))
    tokenizer = TextTokenizer.from_gguf(gguf)
    renderer = ChatRenderer.from_gguf(gguf, tokenizer.vocabulary)
    state = EngineState(True, ready=WorkerReady(1 << 16, 8, 1 << 12, 1 << 12, 0, 0, "a test"))
    engine = EngineClient(router, router, Metrics("m"), state=state)  # type: ignore[arg-type]
    service = Service(config, "m", engine, engine.metrics, {})
    service.text = ModelText.of(tokenizer, renderer, formats_of(config, tokenizer, *renderer.sources))
    reading = asyncio.create_task(engine.run())
    try:
        with Walk() as walk:
            body = ChatCompletionRequest.model_validate(BODY)
            chunks = [
                chunk async for chunk in ChatHandler(service, body, "x", Caller(time.monotonic())).chunks()
            ]
        return walk, chunks
    finally:
        reading.cancel()
        renderer.close()
        service.grammars.close()


@pytest.fixture(scope="module")
def walk() -> Walk:
    found, chunks = asyncio.run(walked())
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "Hi"
    return found


def test_a_body_goes_its_way_once_and_in_one_order(walk: Walk) -> None:
    assert [name for name in walk.names if name in WAY] == WAY, walk.names


def test_it_hardly_returns_to_where_it_has_been(walk: Walk) -> None:
    assert len(walk.returns) <= MOST_RETURNS, walk.returns
