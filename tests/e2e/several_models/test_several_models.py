"""Several models behind one port, with memory for two of them: real servers, real processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moeserve.cli.command_line import demonstration_model
from tests.e2e.several_models.two_models import PATIENCE_S, two_models
from tests.support.servers.server import Server, running_server, stream_events, title_of
from tests.support.servers.waiting import until

KEY = "k-1"
CHAT = "/v1/chat/completions"
# An answer that takes a second or two: what happens meanwhile is done within a tenth of one.
ANSWER = {"stream": True, "max_tokens": 300, "ignore_eos": True, "prompt": "Once"}


class Models:
    """A server with several models, and a client of it."""

    def __init__(self, server: Server, folder: Path, entries: list[dict[str, Any]]) -> None:
        self.server = server
        self.entries = entries
        self.folder = folder
        headers = {"authorization": f"Bearer {KEY}"}
        self.client = httpx.Client(base_url=server.base_url, headers=headers, timeout=PATIENCE_S)

    def chat(self, model: str | None, tokens: int = 4, **fields: Any) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": tokens,
            "temperature": 0,
            **fields,
        }
        return self.client.post(CHAT, json=body if model is None else {"model": model, **body})

    def states(self) -> dict[str, str]:
        return {card["id"]: card["state"] for card in self.client.get("/v1/models").json()["data"]}

    def are_measured(self) -> bool:
        """Whether each file has been looked at: before that a refusal may come too late to have a status."""
        cards = self.client.get("/models").json()["data"]
        return all(card["memory_bytes"] or card["status"].get("failed") for card in cards)

    def metric(self, name: str, model: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"moeserve:{name}{{") and f'model_name="{model}"' in line:
                return float(line.rpartition(" ")[2])
        raise AssertionError(f"there is no {name} of {model}")

    def process(self, title: str, model: str) -> psutil.Process:
        """A process of one model's server."""
        launcher = self.launcher(model)
        (found,) = [one for one in launcher.children(recursive=True) if title_of(one) == f"moeserve: {title}"]
        return found

    def launcher(self, model: str) -> psutil.Process:
        place = [Path(entry["model"]).stem for entry in self.entries].index(model)
        (front,) = [one for one in self.server.processes() if title_of(one) == "moeserve: front"]
        for child in front.children():
            if any(f"/model-{place}/" in str(socket.laddr) for socket in child.net_connections(kind="unix")):
                return child
        raise AssertionError(f"{model} has no process")

    def until(self, happens: Callable[[], bool]) -> None:
        until(happens, PATIENCE_S, lambda: self.server.log)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("a", "b", "c", "large", "vanishing"):
        shutil.copy(demonstration_model(), folder / f"{name}.gguf")
    whole = demonstration_model().read_bytes()
    (folder / "broken.gguf").write_bytes(whole[: len(whole) // 2])
    entries: list[dict[str, Any]] = [
        {"model": str(folder / "a.gguf"), "served-model-name": "a,first"},
        *({"model": str(folder / f"{name}.gguf")} for name in ("b", "c", "broken", "vanishing")),
        {"model": str(folder / "large.gguf"), "max-total-tokens": 1 << 22},
        {"model": str(folder / "late.gguf")},  # not there yet
        {"model": str(folder / "c.gguf"), "served-model-name": "blind", "mmproj": str(folder / "mm.gguf")},
    ]
    (folder / "models.yaml").write_text(json.dumps(entries))
    # A model needs 0.35 GiB with 4096 tokens of KV, and what all share 0.2.
    flags = ["--models-memory", "1", "--max-total-tokens", "4096", "--api-key", KEY]
    with running_server(None, "--models-file", str(folder / "models.yaml"), *flags) as server:
        yield Models(server, folder, entries)


def test_nothing_is_loaded_for_whoever_has_no_key(models: Models) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}):
        with httpx.Client(base_url=models.server.base_url, headers=headers) as stranger:
            for path in (CHAT, "/v1/completions", "/api/generate", "/models/load", "/v1/messages"):
                assert stranger.post(path, json={"model": "a"}).status_code == 401, path
            assert stranger.get("/v1/models").status_code == 401
    for path, body, status in (
        ("/v1/nothing", b'{"model": "a"}', 404),
        (CHAT, b"{", 400),
        (CHAT, b'{"model": "z"}', 404),
        (CHAT, b"x" * (33 << 20), 413),
    ):
        assert models.client.post(path, content=body).status_code == status
    assert models.client.put(CHAT, json={"model": "a"}).status_code == 405
    assert set(models.states().values()) == {"unloaded"}


def test_questions_load_nothing(models: Models) -> None:
    for card in models.client.get("/models").json()["data"]:
        assert models.client.post("/api/show", json={"model": card["id"]}).status_code == 200
    assert models.client.get("/props?model=b").json()["error"]["code"] == "model_not_loaded"
    assert models.client.get("/metrics?model=b").status_code == 503
    assert models.client.get("/api/ps").json() == {"models": []}
    assert models.client.get("/v1/mcp/servers").json() == {"servers": []}, "the front's own answer"
    assert {"a:latest", "a"} & {one["name"] for one in models.client.get("/api/tags").json()["models"]}
    assert set(models.states().values()) == {"unloaded"}


@pytest.mark.slow  # half a minute
def test_three_models_by_turns_and_none_is_lost(models: Models) -> None:
    """Each request is answered, by its model, and never are more than two loaded."""
    seen: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            seen.append(sum(state != "unloaded" for state in set_of(models).values()))

    def ask(place: int) -> tuple[str, httpx.Response]:
        name = "abc"[place % 3]
        return name, models.chat(name, 16)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(ask, range(24)))
    finally:
        ended.set()
        watcher.join()
    for name, answer in answers:
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == name
        if not answer.text.startswith("\n"):  # the answer did not begin while the model was loaded
            assert float(answer.headers["x-moeserve-load-seconds"]) >= 0
    assert max(seen) == 2
    loads = sum(models.metric("model_loads_total", name) for name in "abc")
    evictions = sum(models.metric("model_evictions_total", name) for name in "abc")
    assert loads >= 3
    assert evictions == loads - 2
    assert all(models.metric("model_most_swaps_waited", name) <= 2 for name in "abc")
    assert models.metric("model_load_failures_total", "a") == 0


def set_of(models: Models) -> dict[str, str]:
    """The states of the models that have files of their own."""
    return {name: state for name, state in models.states().items() if name in "abc"}


@pytest.mark.slow  # a quarter of a minute and more
def test_a_stream_says_what_it_waits_for(models: Models) -> None:
    models.client.post("/api/generate", json={"model": "a", "keep_alive": 0})
    models.until(lambda: models.states()["a"] == "unloaded")
    body = {
        "model": "first",
        "stream": True,
        "max_tokens": 4,
        "messages": [{"role": "user", "content": "Hi"}],
    }
    with models.client.stream("POST", CHAT, json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        text = answer.read().decode()
    assert ": loading: " in text
    assert text.endswith("data: [DONE]\n\n")
    assert '"model":"a"' in text
    refused = {**body, "temperature": -5}
    models.client.post("/models/unload", json={"model": "a"})
    models.until(lambda: models.states()["a"] == "unloaded")
    with models.client.stream("POST", CHAT, json=refused) as answer:
        (event,) = stream_events(answer)
    assert event["error"]["param"] == "temperature", "the status was told before the model could refuse"


def test_a_disconnect_reaches_the_model(models: Models) -> None:
    assert models.chat("a").status_code == 200
    body = {"model": "a", "stream": True, "max_tokens": 1500, "ignore_eos": True, "prompt": "Once"}
    with models.client.stream("POST", "/v1/completions", json=body) as answer:
        events = stream_events(answer)  # kept: its end would close the connection
        next(events)
        assert models.metric("model_running_requests", "a") == 1
    models.until(lambda: models.metric("model_running_requests", "a") == 0)

    def aborted() -> bool:
        text = models.client.get("/metrics?model=a").text
        return 'moeserve:request_success_total{finished_reason="abort",model_name="a"} 0.0' not in text

    models.until(aborted)


def test_one_that_is_killed_takes_no_other_with_it(models: Models) -> None:
    for name in "ab":
        assert models.chat(name).status_code == 200
    with models.client.stream("POST", "/v1/completions", json=ANSWER | {"model": "b"}) as answer:
        events = stream_events(answer)
        next(events)
        left = models.launcher("a").children(recursive=True)
        models.launcher("a").kill()
        psutil.wait_procs(left, timeout=PATIENCE_S)
        assert not any(process.is_running() for process in left), "its processes end with it"
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
    models.until(lambda: models.states()["a"] == "unloaded")
    answer = models.chat("a")  # loaded at once: a kill is no load that failed
    assert answer.status_code == 200
    # Its own launcher replaces one of its inner processes: the front sees nothing of it.
    models.process("worker", "a").kill()
    assert models.chat("a").status_code == 200
    assert models.chat("b").status_code == 200


@pytest.mark.slow  # a quarter of a minute and more
def test_what_cannot_be_had_says_why_and_touches_nothing(models: Models) -> None:
    for name in "ab":
        assert models.chat(name).status_code == 200
    models.until(models.are_measured)
    launchers = {name: models.launcher(name).pid for name in "ab"}
    large = models.chat("large")
    assert large.status_code == 400
    assert "needs " in large.json()["error"]["message"]
    assert "0.79 GiB of RAM can be had" in large.json()["error"]["message"]
    broken = models.chat("broken")
    assert broken.status_code == 503
    assert "cannot be loaded" in broken.json()["error"]["message"]
    assert "broken.gguf" in broken.json()["error"]["message"]
    assert int(broken.headers["retry-after"]) >= 1
    (models.folder / "vanishing.gguf").unlink()
    vanished = models.chat("vanishing")
    assert vanished.status_code == 503
    assert "vanishing.gguf" in vanished.json()["error"]["message"]
    late, blind = models.chat("late"), models.chat("blind")
    assert (late.status_code, blind.status_code) == (503, 503)
    assert "late.gguf is not there" in late.json()["error"]["message"]
    assert "there is no file mm.gguf" in blind.json()["error"]["message"]
    assert models.states()["a"] == models.states()["b"] == "loaded"
    assert {name: models.launcher(name).pid for name in "ab"} == launchers, "and not loaded again"
    status = {card["id"]: card["status"] for card in models.client.get("/models").json()["data"]}
    for name in ("broken", "vanishing", "late", "blind"):
        assert status[name]["failed"]
    assert "late.gguf" in status["late"]["reason"]
    assert models.client.get("/health").json()["models"]["broken"] == "failed"
    assert models.client.get("/health").status_code == 200
    shutil.copy(demonstration_model(), models.folder / "vanishing.gguf")
    shutil.copy(demonstration_model(), models.folder / "late.gguf")
    for name in ("vanishing", "late"):
        assert models.chat(name).status_code == 200


def test_keep_alive_and_ps_mean_what_they_say(models: Models) -> None:
    lines = models.client.post(
        "/api/chat",
        json={
            "model": "a:latest",
            "messages": [{"role": "user", "content": "Hi"}],
            "keep_alive": "10m",
            "options": {"num_predict": 3},
        },
    ).text.splitlines()
    assert json.loads(lines[-1])["done"]
    running = {one["name"]: one for one in models.client.get("/api/ps").json()["models"]}
    assert not running["a"]["expires_at"].startswith("2318")
    assert running["a"]["size"] > 100 << 20
    assert running["a"].keys() >= {"name", "model", "size", "size_vram", "digest", "details", "expires_at"}
    forever = {"model": "a", "prompt": "Hi", "stream": False, "keep_alive": -1, "options": {"num_predict": 1}}
    assert models.client.post("/api/generate", json=forever).json()["done"]
    (running_a,) = [one for one in models.client.get("/api/ps").json()["models"] if one["name"] == "a"]
    assert running_a["expires_at"].startswith("2318")
    said = models.client.post("/api/generate", json={"model": "a", "keep_alive": 0, "stream": False}).json()
    assert said["done_reason"] == "unload"
    models.until(lambda: models.states()["a"] == "unloaded")
    # Open WebUI and scripts unload by a chat without messages, also what is not loaded.
    said = models.client.post("/api/chat", json={"model": "a", "messages": [], "keep_alive": "0s"}).json()
    assert (said["done_reason"], said["message"]["content"]) == ("unload", "")
    (card,) = [one for one in models.client.get("/models").json()["data"] if one["id"] == "a"]
    assert card["status"] == {"value": "unloaded"}, "an unload is no failure (llama.cpp#23257)"
    assert models.client.post("/models/unload", json={"model": "a"}).status_code == 400
    assert models.client.post("/models/load", json={"model": "a"}).json() == {"success": True}
    models.until(lambda: models.states()["a"] == "loaded")


def test_a_response_is_found_at_its_model(models: Models) -> None:
    made = models.client.post(
        "/v1/responses", json={"model": "a", "input": "Hi", "max_output_tokens": 16}
    ).json()
    assert models.client.get(f"/v1/responses/{made['id']}").json()["id"] == made["id"]
    assert models.client.get("/v1/responses/resp_none").status_code == 404
    refused = models.client.post(f"/v1/responses/{made['id']}/cancel")
    assert (refused.status_code, "only background" in refused.text) == (400, True)
    assert models.client.delete(f"/v1/responses/{made['id']}").status_code == 200
    assert models.client.post(f"/v1/responses/{made['id']}/cancel").status_code == 404


@pytest.mark.slow  # a quarter of a minute and more
def test_a_background_response_keeps_its_model_loaded(models: Models) -> None:
    """With and without a client that reads its events; the model is unloaded when the last has ended."""
    array = {"type": "array", "items": {"type": "integer"}, "minItems": 2000}
    schema = {
        "type": "object",
        "properties": {"all": array},
        "required": ["all"],
        "additionalProperties": False,
    }
    format = {"type": "json_schema", "name": "long", "schema": schema}
    body = {
        "model": "a",
        "input": "Hi",
        "max_output_tokens": 1500,
        "background": True,
        "text": {"format": format},
    }
    first = models.client.post("/v1/responses", json=body)
    assert first.status_code == 200, first.text
    with models.client.stream("POST", "/v1/responses", json=body | {"stream": True}) as answer:
        assert next(stream_events(answer))["type"] == "response.created"
    models.client.post("/api/generate", json={"model": "a", "keep_alive": 0})  # as soon as nothing runs on it
    assert models.metric("model_running_requests", "a") >= 1
    ended: dict[str, Any] = {}
    while models.states()["a"] != "unloaded":
        found = models.client.get(f"/v1/responses/{first.json()['id']}")
        if found.status_code == 200:
            ended = found.json()
        time.sleep(0.1)
    assert ended["status"] == "incomplete", "at its most tokens, and not cut off by the unload"
    assert ended["usage"]["output_tokens"] == 1500


def test_a_download_is_the_fronts_business(models: Models) -> None:
    """The front answers it, and loads no model for it."""
    before = models.states()
    refused = models.client.post("/api/pull", json={"model": "acme/tiny:Q4_K_M"})
    assert (refused.status_code, "--pull allow" in refused.json()["error"]) == (403, True)
    assert models.client.request("DELETE", "/api/delete", json={"model": "acme/tiny"}).status_code == 403
    assert models.states() == before


def test_a_front_that_crashes_is_started_again(models: Models) -> None:
    assert models.chat("a").status_code == 200
    (front,) = [one for one in models.server.processes() if title_of(one) == "moeserve: front"]
    servers = front.children(recursive=True)
    os.kill(front.pid, signal.SIGKILL)
    psutil.wait_procs(servers, timeout=PATIENCE_S)
    assert not any(process.is_running() for process in servers), "no process holds the memory"
    assert models.chat(None).json()["model"] == "a", "whoever connects meanwhile waits"


def test_sigterm_lets_answers_end(tmp_path: Path) -> None:
    with running_server(None, *two_models(tmp_path), "--models-memory", "2") as server:
        with httpx.Client(base_url=server.base_url, timeout=PATIENCE_S) as client:
            assert (
                client.post(
                    CHAT, json={"model": "a", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
                ).status_code
                == 200
            )
            with client.stream("POST", "/v1/completions", json=ANSWER | {"model": "b"}) as answer:
                events = stream_events(answer)
                next(events)
                family = server.processes()
                server.process.send_signal(signal.SIGTERM)
                assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(60) == 0
        psutil.wait_procs(family, timeout=PATIENCE_S)
        assert not [process for process in family if process.is_running()]


def test_a_front_that_was_stopped_is_continued(tmp_path: Path) -> None:
    flags = ["--models-memory", "2", "--step-timeout", "4"]
    with running_server(None, *two_models(tmp_path), *flags) as server:
        (front,) = [one for one in server.processes() if title_of(one) == "moeserve: front"]
        front.suspend()
        assert httpx.get(server.base_url + "/health", timeout=PATIENCE_S).status_code == 200
        assert front.is_running()
        assert "was stopped; it is continued" in server.log
