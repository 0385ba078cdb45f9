"""The real httpserver process, with an engine at the other end of its sockets that echoes the prompt.

The engine speaks the real messages, so that what HTTP makes of them can be tested alone: tests set `answer` to
choose what comes back, and look at `requests` and `aborted`.
"""

from __future__ import annotations

import os
import signal
import ssl
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import zmq

from moeserve.config import ENV_PREFIX, ServerConfig, to_json_dict
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.codec import TO_LAUNCHER, TO_ROUTER
from moeserve.messages.sampling import FinishReason
from moeserve.messages.schema import (
    Abort,
    EngineReadyRequest,
    ExpertUseRequest,
    GenerateBatch,
    GenerateRequest,
    ProcessFailed,
    ProcessReady,
    TextItem,
    TextOut,
    Usage,
)
from moeserve.models.sources.gguf import open_gguf
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from tests.support.servers.engine_messages import CONTEXT, logprobs_of, ready_message
from tests.support.servers.forked_process import ForkedProcess
from tests.support.servers.waiting import within

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = REPOSITORY / "tests" / "fixtures" / "tiny-qwen3moe-q4_k_m.gguf"
NAME = "echo-model"

# One for all: httpx would read the authorities' certificates for each request, which takes longer than the request.
TLS = ssl.create_default_context()

Answer = Callable[["HttpServer", GenerateRequest], None]


def tokens_of(request: GenerateRequest) -> list[int]:
    return list(array("i", request.token_ids))


def echo(server: HttpServer, request: GenerateRequest) -> None:
    """The prompt's tokens again and again until max_tokens, one item each."""
    prompt, sampling = tokens_of(request), request.sampling
    output = [prompt[i % len(prompt)] for i in range(sampling.max_tokens)]
    usage = Usage(len(prompt), len(output), 0, 1.0, 2.0, 4.0)
    prompt_logprobs = None
    if sampling.prompt_logprobs is not None:
        prompt_logprobs = [logprobs_of(t, sampling.prompt_logprobs) for t in prompt[1:]]
    items = [
        TextItem(
            request.id,
            server.tokenizer.token_text(token_id),
            [token_id],
            None if sampling.logprobs is None else [logprobs_of(token_id, sampling.logprobs)],
        )
        for token_id in output
    ] or [TextItem(request.id, "", [])]
    items[0] = msgspec.structs.replace(items[0], prompt_logprobs=prompt_logprobs)
    items[-1] = msgspec.structs.replace(items[-1], finish_reason="length", usage=usage)
    for item in items:
        server.send(TextOut([item]))


def say(*pieces: str, reason: FinishReason = "stop", stop_reason: str | int | None = None) -> Answer:
    """An engine that answers every request with these texts, an item and a token each."""

    def answer(server: HttpServer, request: GenerateRequest) -> None:
        usage = Usage(len(tokens_of(request)), len(pieces), 0, 1.0, 2.0, 4.0)
        for piece in pieces:
            ids = server.tokenizer.encode(piece or "x")[:1]  # without text: its text comes with the next
            logprobs = None if request.sampling.logprobs is None else [logprobs_of(ids[0], 2)]
            server.send(TextOut([TextItem(request.id, piece, ids, logprobs)]))
        end = TextItem(request.id, "", [], finish_reason=reason, stop_reason=stop_reason, usage=usage)
        server.send(TextOut([end]))

    return answer


def silence(server: HttpServer, request: GenerateRequest) -> None:
    """A request that stays in the queue."""


@cache
def _tokenizer_of(model: Path) -> TextTokenizer:
    return TextTokenizer.from_gguf(open_gguf(model))


class HttpServer:
    """An httpserver process in a runtime directory of its own; this object is the rest of the server."""

    def __init__(self, *, module: str = "moeserve.httpserver", context: int = CONTEXT, **config: Any) -> None:
        """Runs the module as a program with a ServerConfig of the fields `config`, and a model of `context` tokens."""
        self.context = context
        self.answer: Answer = echo
        self.requests: list[GenerateRequest] = []
        self.aborted: list[int] = []
        self.expert_use_asked = 0  # times
        self.engine_ready_asked = 0
        self.config = config
        self._open: set[int] = set()  # requests without an end, which the process counts
        self._model = Path(config.get("model", MODEL))
        self.directory = tempfile.TemporaryDirectory(prefix="moeserve-test-")
        paths = RuntimePaths(Path(self.directory.name))
        settings: dict[str, Any] = {"model": str(MODEL), "served_model_name": NAME, "port": 0} | config
        paths.config_file.write_bytes(msgspec.json.encode(to_json_dict(ServerConfig(**settings))))
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._launcher = PullChannel(self._context, paths.launcher, TO_LAUNCHER)
        self._router = PullChannel(self._context, paths.router, TO_ROUTER)
        self._to_http = PushChannel(self._context, paths.http)
        self._sending = threading.Lock()
        environment = os.environ | {ENV_PREFIX + "RUNTIME_DIR": self.directory.name}
        self._start = partial(ForkedProcess, module, environment)
        self.process = self._start()
        self._running = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.url = ""

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The model's: of one that cannot be opened it is never asked for."""
        return _tokenizer_of(self._model)

    def start_message(self) -> ProcessReady | ProcessFailed:
        """What the process tells the launcher."""
        message = self._launcher.recv(timeout=30)
        assert message is not None, "httpserver said nothing to the launcher"
        assert isinstance(message, ProcessReady | ProcessFailed)
        if isinstance(message, ProcessReady):
            assert message.url is not None
            self.url = message.url
        return message

    def start_again(self) -> None:
        """Kills the process, and starts another in its place."""
        self.process.kill()
        self.process.wait(30)
        self.process = self._start()
        assert isinstance(self.start_message(), ProcessReady)

    def engine_ready(self) -> None:
        self.send(ready_message(self.tokenizer.vocabulary.size, context=self.context))
        assert within(30, lambda: self.get("/health").status_code == 200)

    def send(self, message: msgspec.Struct) -> None:
        with self._sending:
            if isinstance(message, TextOut):
                self._open -= {item.id for item in message.items if item.finish_reason is not None}
            self._to_http.send(message)

    def begin_anew(self) -> None:
        """For other tests: what these have left open ends, and the engine is as it was at first."""
        self.answer = echo
        for id in list(self._open):
            self.send(
                TextOut([TextItem(id, "", [], finish_reason="abort", usage=Usage(1, 0, 0, 1.0, 2.0, 4.0))])
            )
        self.requests, self.aborted, self.expert_use_asked = [], [], 0

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=30, verify=TLS, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, verify=TLS, **kwargs)

    def metrics(self) -> dict[str, float]:
        lines = self.get("/metrics").text.splitlines()
        return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}

    def metric(self, name: str, labels: str = "") -> float:
        return self.metrics()[f'moeserve:{name}{{{labels}model_name="{NAME}"}}']

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30)
        self._running = False
        self._thread.join(30)
        self._context.destroy(linger=0)
        self.directory.cleanup()

    def _run(self) -> None:
        while self._running:
            message = self._router.recv(timeout=0.05)
            if isinstance(message, GenerateRequest | GenerateBatch):
                for request in message.unpacked() if isinstance(message, GenerateBatch) else [message]:
                    self.requests.append(request)
                    self._open.add(request.id)
                    self.answer(self, request)
            elif isinstance(message, Abort):
                self.aborted.append(message.id)
            elif isinstance(message, ExpertUseRequest):
                self.expert_use_asked += 1
            elif isinstance(message, EngineReadyRequest):
                self.engine_ready_asked += 1


@contextmanager
def http_server(
    *, module: str = "moeserve.httpserver", context: int = CONTEXT, **config: Any
) -> Iterator[HttpServer]:
    """A process that serves."""
    server = HttpServer(module=module, context=context, **config)
    try:
        started = server.start_message()
        assert isinstance(started, ProcessReady), started
        server.engine_ready()
        yield server
    finally:
        server.close()
