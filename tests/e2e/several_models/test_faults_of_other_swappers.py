"""Faults that public reports tell of other servers that swap models, tried with memory for one model at a time."""

from __future__ import annotations

import json
import random
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import psutil
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.support.servers.server import Server, running_server, title_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PATIENCE_S = 300.0  # for a load on a busy machine
REPOSITORY = "org/tiny-GGUF:Q8_0"  # a name with what paths and queries give a meaning to
NAMES = ("a", "b", REPOSITORY)


class Swapping:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.client = httpx.Client(base_url=server.base_url, timeout=PATIENCE_S)

    def complete(self, model: str, tokens: int = 2, **fields: Any) -> httpx.Response:
        body = {"model": model, "prompt": "Once", "max_tokens": tokens, "ignore_eos": True, **fields}
        return httpx.post(f"{self.server.base_url}/v1/completions", json=body, timeout=PATIENCE_S)

    def tokenize(self, model: str) -> httpx.Response:
        body = {"model": model, "prompt": "Once"}
        return httpx.post(f"{self.server.base_url}/tokenize", json=body, timeout=PATIENCE_S)

    @staticmethod
    def code(answer: httpx.Response) -> str:
        """Returns the code of the error that the answer has; "" for a good one."""
        return str(answer.json().get("error", {}).get("code", ""))

    def state(self, model: str) -> str:
        return str(self.client.get(f"/v1/models/{quote(model)}").json()["state"])

    def until(self, model: str, *states: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while self.state(model) not in states:
            assert time.monotonic() < deadline, self.server.log
            time.sleep(0.02)

    def load(self, model: str) -> None:
        answer = self.complete(model)
        assert self.code(answer) == "", answer.text

    def unload(self, model: str) -> None:
        if self.state(model) == "loaded":
            self.client.post("/models/unload", json={"model": model})
        self.until(model, "unloaded")

    def launchers(self) -> list[psutil.Process]:
        """Returns the launchers of the models' servers."""
        (front,) = [one for one in self.server.processes() if title_of(one) == "moeserve: front"]
        return [one for one in front.children() if title_of(one) == "moeserve: launcher"]


@pytest.fixture(scope="module")
def swapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swapping]:
    folder = tmp_path_factory.mktemp("models")
    for place in range(len(NAMES)):
        shutil.copy(demonstration_model(), folder / f"{place}.gguf")
    whole = demonstration_model().read_bytes()
    (folder / "broken.gguf").write_bytes(whole[: len(whole) // 2])
    entries = [
        {"model": str(folder / f"{place}.gguf"), "served-model-name": name}
        for place, name in enumerate(NAMES)
    ]
    entries.append({"model": str(folder / "broken.gguf")})
    (folder / "models.json").write_text(json.dumps(entries))
    flags = ["--models-memory", "0.6", "--max-total-tokens", "4096", "--model-load-timeout", "600"]
    with running_server(None, "--models-file", str(folder / "models.json"), *flags) as server:
        yield Swapping(server)


def test_a_model_is_not_unloaded_before_the_request_that_loaded_it(swapping: Swapping) -> None:
    """llama.cpp#28698, A: a request for another model that waits had the model evicted as soon as it was loaded."""
    for _ in range(2):
        for model in "ab":
            swapping.unload(model)
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(swapping.tokenize, "a")
            swapping.until("a", "loading", "loaded")
            second = pool.submit(swapping.tokenize, "b")
            assert [swapping.code(one.result()) for one in (first, second)] == ["", ""]


def test_a_request_for_a_model_that_is_just_unloaded_waits_for_the_next_load(swapping: Swapping) -> None:
    """llama.cpp#28698, B: it was passed to the server that was ending. And by unloads that clients ask for: at any
    moment of the end."""
    for pause_s in (0.0, 0.03, 0.1, 0.3):
        swapping.load("a")
        with ThreadPoolExecutor(2) as pool:
            other = pool.submit(swapping.complete, "b")
            swapping.until("a", "closing", "stopping", "unloaded")
            time.sleep(pause_s)
            again = pool.submit(swapping.complete, "a")
            assert [swapping.code(one.result()) for one in (other, again)] == ["", ""]
        swapping.load("a")
        assert swapping.client.post("/models/unload", json={"model": "a"}).status_code == 200
        time.sleep(pause_s)
        swapping.load("a")


def test_a_model_that_is_asked_for_all_the_time_can_be_unloaded(swapping: Swapping) -> None:
    """ollama#14364: it stayed in "Stopping..." for as long as its clients' connections were open."""
    swapping.load("a")
    ended = threading.Event()

    def client() -> list[str]:
        codes = []
        while not ended.is_set():
            codes.append(swapping.code(swapping.complete("a", 20)))
        return codes

    loads = metric(swapping, "model_loads_total", "a")
    with ThreadPoolExecutor(5) as pool:
        clients: list[Future[list[str]]] = [pool.submit(client) for _ in range(4)]
        try:
            for _ in range(2):
                swapping.until("a", "loaded")
                swapping.client.post("/models/unload", json={"model": "a"})
                swapping.until("a", "stopping", "unloaded", "loading")
            swapping.load("b")
        finally:
            ended.set()
        assert {code for one in clients for code in one.result()} == {""}
    assert metric(swapping, "model_loads_total", "a") >= loads + 2


def metric(swapping: Swapping, name: str, model: str) -> float:
    for line in swapping.client.get("/metrics").text.splitlines():
        if line.startswith(f"moeserve:{name}{{") and f'model_name="{model}"' in line:
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"there is no {name} of {model}")


def test_a_time_without_requests_begins_at_the_end_of_the_last_one(swapping: Swapping) -> None:
    """llama-swap#588: it began at the load, so long answers were cut. lmstudio-bug-tracker#634: the next request loaded
    the model a second time beside the first."""
    body = {"model": "a", "prompt": "Once", "stream": False, "keep_alive": "1s"}
    body["options"] = {"num_predict": 600}
    began = time.monotonic()
    said = swapping.client.post("/api/generate", json=body).json()
    assert said["eval_count"] == 600 or said["done_reason"] == "stop", said
    assert time.monotonic() - began > 1.0 or said["done_reason"] == "stop"
    swapping.until("a", "unloaded")
    swapping.load("a")
    assert len(swapping.launchers()) == 1


def test_small_models_by_turns_as_fast_as_they_come(swapping: Swapping) -> None:
    """llama-swap#119: after some quick turns it swapped no more. llama-swap#38: a 500 while a model ended."""
    chance = random.Random(119)
    for _ in range(12):
        model = chance.choice(NAMES)
        assert swapping.complete(model).json()["model"] == model
        if chance.random() < 0.4:
            swapping.client.post("/models/unload", json={"model": model})
        assert len(swapping.launchers()) <= 1


def test_a_name_of_a_repository_is_a_name_everywhere(swapping: Swapping) -> None:
    """llama.cpp#24439: a name of this form was taken for a download."""
    swapping.load(REPOSITORY)
    for written in (quote(REPOSITORY), quote(REPOSITORY, safe="")):
        assert swapping.client.get(f"/v1/models/{written}").json()["id"] == REPOSITORY
        for path in ("/props", "/metrics", "/tokenizer_info"):
            assert swapping.client.get(f"{path}?model={written}").status_code == 200, path
    body = {"model": REPOSITORY, "prompt": "Once", "stream": False, "options": {"num_predict": 2}}
    assert swapping.client.post("/api/generate", json=body).json()["done"]
    assert swapping.client.post("/models/unload", json={"model": REPOSITORY}).json() == {"success": True}
    swapping.until(REPOSITORY, "unloaded")


def test_a_model_that_cannot_be_loaded_does_not_stay_loading(swapping: Swapping) -> None:
    """llama.cpp#27351: a broken entry showed a load without an end. lmstudio-bug-tracker#1217: another model
    answered."""
    swapping.load("a")
    swapping.client.post("/models/load", json={"model": "broken"})
    deadline = time.monotonic() + PATIENCE_S
    while not (card := swapping.client.get("/v1/models/broken").json())["status"].get("failed"):
        assert time.monotonic() < deadline, card
        time.sleep(0.05)
    assert "broken.gguf" in card["status"]["reason"]
    # As a stream: another answer that has begun before the load failed is cut, so that it is not taken for whole.
    assert "cannot be loaded" in swapping.complete("broken", stream=True).text
    assert swapping.code(swapping.complete("neither")) == "model_not_found"
    assert swapping.state("a") == "loaded"


def test_curls_content_type_and_gzip_name_a_model_too(swapping: Swapping) -> None:
    """llama-swap#921: "no model id could be identified" for curl -d, which says that it sends a form."""
    body = json.dumps({"model": "b", "prompt": "Once", "max_tokens": 2}).encode()
    for headers in ({"content-type": "application/x-www-form-urlencoded"}, {}):
        answer = swapping.client.post("/v1/completions", content=body, headers=headers)
        assert answer.json()["model"] == "b", answer.text


def test_a_client_that_reads_nothing_keeps_no_model_from_others(swapping: Swapping) -> None:
    """ollama#7779: a model whose client had stopped reading stayed in "Stopping..."."""
    swapping.load("a")
    address = urlsplit(swapping.server.base_url)
    body = {
        "model": "a",
        "prompt": "Once",
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 5,
    }
    sent = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(sent)}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((address.hostname, address.port))
        connection.sendall(head.encode() + sent)
        assert connection.recv(64)
        swapping.load("b")


def test_questions_without_a_model_are_answered_while_none_is_loaded(swapping: Swapping) -> None:
    """pi-llama-cpp#22: /props without a name was a 404, so a client found no models."""
    for model in NAMES:
        swapping.unload(model)
    said = swapping.client.get("/props").json()
    assert said["role"] == "router"
    assert (
        said["default_generation_settings"]["n_ctx"]
        == swapping.client.get("/v1/models/a").json()["max_model_len"]
    )
    assert swapping.state("a") == "unloaded"
    assert swapping.client.get("/props?model=b").json()["error"]["code"] == "model_not_loaded"
