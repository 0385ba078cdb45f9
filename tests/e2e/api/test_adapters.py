"""LoRA adapters in a server: models of their own, chosen by the request, each with its own cached prompts."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.e2e.completions import streamed
from tests.e2e.survival.reloading import reload
from tests.support.models.hugging_face_model import read_model, write_model
from tests.support.models.peft_adapters import ATTENTION, EXPERTS, ROUTER, write_adapter
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

pytestmark = pytest.mark.cpu_engine("adapters")
NAMES = ("tiny", "first", "second")
LATER = ("third", "fourth")  # in --lora-dir, not loaded at the start
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("adapters")
    write_model(folder / "model")
    base = read_model(folder / "model")
    for seed, name in enumerate((*NAMES[1:], *LATER)):
        write_adapter(folder / name, base, seed, r=4, lora_alpha=8, target_modules=ATTENTION,
                      target_parameters=[ROUTER, *EXPERTS])  # fmt: skip
    modules = [f"{name}={folder / name}" for name in NAMES[1:]]
    _write_bad(folder / "fourth", folder / "bad")
    (folder / "outside").symlink_to("/")
    shutil.copytree(folder / "fourth", folder / "leads-out")
    secret = tmp_path_factory.mktemp("elsewhere") / "secret"
    (folder / "leads-out" / "adapter_model.safetensors").rename(secret)
    (folder / "leads-out" / "adapter_model.safetensors").symlink_to(secret)
    flags = (
        "--lora-dir",
        str(folder),
        "--max-loras",
        "4",
        "--max-engine-crashes",
        "9",
        "--served-model-name",
        "tiny",
    )
    with running_server(folder / "model", *flags, "--lora-modules", *modules) as started:
        yield started


def _write_bad(good: Path, bad: Path) -> None:
    """An adapter with one tensor too short."""
    shutil.copytree(good, bad)
    tensors = load_file(bad / "adapter_model.safetensors")
    name = next(name for name in sorted(tensors) if "q_proj" in name)
    save_file(tensors | {name: tensors[name][:, 1:].contiguous()}, bad / "adapter_model.safetensors")


def complete(server: Server, model: str, prompt: str = PROMPT, **more: object) -> dict[str, Any]:
    body = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return server.post("/v1/completions", body | more)


def test_each_adapter_is_a_model(server: Server) -> None:
    cards = {card["id"]: card for card in httpx.get(server.base_url + "/v1/models").json()["data"]}
    assert list(cards) == list(NAMES)
    assert [card["parent"] for card in cards.values()] == [None, "tiny", "tiny"]
    assert Path(cards["first"]["root"]).name == "first"
    assert httpx.get(server.base_url + "/v1/models/second").json() == cards["second"]
    refused = httpx.post(server.base_url + "/v1/completions", json={"model": "third", "prompt": "a"})
    assert refused.status_code == 404
    assert "'first'" in refused.text


def test_answers_are_the_adapters_own_alone_and_in_a_crowd(server: Server) -> None:
    alone = {name: complete(server, name) for name in NAMES}
    assert [answer["model"] for answer in alone.values()] == list(NAMES)
    texts = {name: answer["choices"][0]["text"] for name, answer in alone.items()}
    assert len(set(texts.values())) == 3
    with ThreadPoolExecutor(9) as pool:
        crowd = list(pool.map(lambda name: (name, complete(server, name)["choices"][0]["text"]), NAMES * 3))
    assert all(text == texts[name] for name, text in crowd)


def test_a_cached_prompt_is_of_one_adapter(server: Server) -> None:
    prompt = "A prompt that nobody has asked before, and that is long enough to be seen. " * 4

    def cached(name: str) -> int:
        usage = complete(server, name, prompt)["usage"]
        found: int = usage["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached(name) for name in NAMES] == [0, 0, 0]
    assert all(cached(name) > 50 for name in NAMES)


def test_a_chat_names_its_adapter(server: Server) -> None:
    body = {"model": "first", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert server.post("/v1/chat/completions", body)["model"] == "first"


@pytest.mark.slow
def test_a_bad_adapter_ends_the_start(server: Server, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dora": true}')
    with pytest.raises(RuntimeError, match="use_dora"):
        Server(None, "--lora-modules", f"bad={tmp_path / 'bad'}")


def order(server: Server, what: str, **body: object) -> tuple[int, str]:
    """Status and text of /v1/load_lora_adapter or unload."""
    answer = httpx.post(f"{server.base_url}/v1/{what}_lora_adapter", json=body, timeout=60)
    return answer.status_code, answer.text


def names_of(server: Server) -> set[str]:
    return {card["id"] for card in httpx.get(server.base_url + "/v1/models").json()["data"]}


@pytest.fixture
def nothing_stays(server: Server) -> Iterator[None]:
    """What a test has loaded is unloaded."""
    yield
    for name in names_of(server) - set(NAMES):
        assert order(server, "unload", lora_name=name)[0] == 200


def folder_of(server: Server) -> Path:
    return Path(httpx.get(server.base_url + "/v1/models/first").json()["root"]).parent


def test_an_order_that_cannot_be_is_refused_by_name(server: Server) -> None:
    refused = [
        ({"lora_name": "x", "lora_path": "bad"}, 400, "q_proj"),
        ({"lora_name": "x", "lora_path": "absent"}, 404, "absent"),
        ({"lora_name": "x", "lora_path": "../"}, 400, "not within"),
        ({"lora_name": "x", "lora_path": "/etc/passwd"}, 400, "not within"),
        ({"lora_name": "x", "lora_path": "outside/etc"}, 400, "not within"),
        ({"lora_name": "x", "lora_path": "leads-out"}, 400, "leads out of the folder of --lora-dir"),
        ({"lora_name": "x", "lora_path": "a\0b"}, 400, "no path"),
        ({"lora_name": "x", "lora_path": "model"}, 400, "adapter_config.json"),
        ({"lora_name": "first", "lora_path": "third"}, 400, "already been loaded"),
        ({"lora_name": "tiny", "lora_path": "third"}, 400, "model itself"),
        ({"lora_path": "third"}, 400, "lora_name"),
    ]
    for body, status, word in refused:
        found, text = order(server, "load", **body)
        assert (found, word in text) == (status, True), (body, found, text)
        assert str(folder_of(server)) not in text, "where the folder lies is not a client's"
    assert order(server, "unload", lora_name="third")[0] == 404
    assert names_of(server) == set(NAMES)


@pytest.mark.usefixtures("nothing_stays")
def test_loading_and_unloading_under_load_loses_nothing(server: Server) -> None:
    alone = {name: complete(server, name)["choices"][0]["text"] for name in NAMES}
    stop = threading.Event()
    answers: list[tuple[str, str]] = []

    def ask(name: str) -> None:
        while not stop.is_set():
            answers.append((name, complete(server, name)["choices"][0]["text"]))

    with ThreadPoolExecutor(3) as pool:
        asking = [pool.submit(ask, name) for name in NAMES]
        try:
            expected = _come_and_go(server)
        finally:
            stop.set()
        for one in asking:
            one.result()
    assert {name for name, _ in answers} == set(NAMES)
    assert all(text == alone[name] for name, text in answers)
    assert len(set(expected) | set(alone.values())) == 5


def _come_and_go(server: Server) -> list[str]:
    """Loads one adapter, has another take its place while an answer runs, unloads that one while an answer runs, and
    loads it again. Returns the answers of the two."""
    assert order(server, "load", lora_name="new", lora_path="third") == (
        200,
        "Success: LoRA adapter 'new' added successfully.",
    )
    first = complete(server, "new", max_tokens=150)["choices"][0]["text"]
    long = streamed(server, model="new", prompt=PROMPT, max_tokens=150)
    begun = next(long)["choices"][0]["text"]
    assert order(server, "load", lora_name="new", lora_path="fourth", load_inplace=True)[0] == 200
    other = complete(server, "new", max_tokens=150)
    assert other["usage"]["prompt_tokens_details"]["cached_tokens"] == 0  # the prompt was the other adapter's
    second = other["choices"][0]["text"]
    assert begun + "".join(event["choices"][0]["text"] for event in long if event["choices"]) == first

    long = streamed(server, model="new", prompt=PROMPT, max_tokens=150)
    begun = next(long)["choices"][0]["text"]
    assert order(server, "unload", lora_name="new") == (
        200,
        "Success: LoRA adapter 'new' removed successfully.",
    )
    assert "new" not in names_of(server)
    assert (
        httpx.post(server.base_url + "/v1/completions", json={"model": "new", "prompt": "a"}).status_code
        == 404
    )
    assert begun + "".join(event["choices"][0]["text"] for event in long if event["choices"]) == second
    assert order(server, "load", lora_name="new", lora_path="fourth")[0] == 200
    assert complete(server, "new", max_tokens=150)["choices"][0]["text"] == second
    return [first[:50], second[:50]]


@pytest.mark.usefixtures("nothing_stays")
def test_as_many_as_the_limit_and_their_room_comes_back(server: Server) -> None:
    def load(name: str, path: str) -> int:
        return order(server, "load", lora_name=name, lora_path=path)[0]

    assert within(30, lambda: load("a", "third") == 200)  # what a test before had may be going still
    assert within(30, lambda: load("b", "fourth") == 200)
    status, text = order(server, "load", lora_name="c", lora_path="first")
    assert (status, "--max-loras" in text) == (400, True)
    assert server.metrics()["moeserve:lora_adapters"] == 4
    assert order(server, "unload", lora_name="a")[0] == 200
    assert within(30, lambda: load("c", "first") == 200)


@pytest.mark.usefixtures("nothing_stays")
@pytest.mark.parametrize(
    "process",
    ["worker", *(pytest.param(other, marks=pytest.mark.slow) for other in ("router", "httpserver"))],
)
def test_what_was_loaded_outlives_the_processes(server: Server, process: str) -> None:
    assert within(30, lambda: order(server, "load", lora_name="new", lora_path="third")[0] == 200)
    alone = complete(server, "new")["choices"][0]["text"]
    long = streamed(server, model="new", prompt=PROMPT, max_tokens=150)
    next(long)
    assert order(server, "unload", lora_name="second")[0] == 200
    server.named(process).kill()
    if process == "httpserver":
        assert within(60, lambda: _is_ready(server))
    else:
        assert [event for event in long if event["choices"]][-1]["choices"][0]["finish_reason"] == "length"
    assert complete(server, "new")["choices"][0]["text"] == alone
    assert names_of(server) == {"tiny", "first", "new"}
    assert order(server, "load", lora_name="second", lora_path="second")[0] == 200


@pytest.mark.slow
def test_what_was_loaded_is_in_the_next_server_of_an_upgrade(server: Server) -> None:
    """Last, because the server's processes are others afterwards."""
    assert within(30, lambda: order(server, "load", lora_name="new", lora_path="third")[0] == 200)
    alone = {name: complete(server, name)["choices"][0]["text"] for name in ("first", "new")}
    assert order(server, "unload", lora_name="second")[0] == 200
    for _ in range(2):
        assert reload(server).returncode == 0
        assert {name: complete(server, name)["choices"][0]["text"] for name in alone} == alone
        assert names_of(server) == {"tiny", *alone}


def _is_ready(server: Server) -> bool:
    try:
        return httpx.get(server.base_url + "/health", timeout=30).status_code == 200
    except httpx.TransportError:
        return False
