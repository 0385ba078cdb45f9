"""Several models by turns in memory for two: nothing is lost, swaps are fair and cheap, and memory is as planned.

Nightly. TURNS_S seconds of eight clients (MOESERVE_TURNS_S sets another length), and REQUESTS requests by turns
(MOESERVE_TURNS_REQUESTS)."""

from __future__ import annotations

import json
import os
import random
import shutil
import statistics
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from moeserve.cli.command_line import demonstration_model
from moeserve.processes.resident_memory import COMMON_BYTES
from tests.support.servers.server import Server, running_server, title_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
CHAT = "/v1/chat/completions"
PATIENCE_S = 1800.0  # for a load on a busy machine
TURNS_S = float(os.environ.get("MOESERVE_TURNS_S", "60"))
CLIENTS = 8
MOST_SWAPS = 3  # that a request waits for
POOL = ["--max-total-tokens", "4096"]
REQUESTS = int(os.environ.get("MOESERVE_TURNS_REQUESTS", "200"))
MOST_TAKEN = 1.03  # of the memory that is planned


@pytest.fixture
def models(tmp_path: Path) -> Path:
    for name in "abcd":
        shutil.copy(demonstration_model(), tmp_path / f"{name}.gguf")
    entries = [{"model": str(tmp_path / f"{name}.gguf")} for name in "abcd"]
    (tmp_path / "models.json").write_text(json.dumps(entries))
    return tmp_path


@pytest.fixture
def server(models: Path) -> Iterator[Server]:
    flags = ["--models-file", str(models / "models.json"), "--models-memory", "1", *POOL]
    disk = ["--kv-disk", str(models / "kv"), "--kv-disk-gib", "0.5"]
    with running_server(None, *flags, *disk, "--model-load-timeout", "1800") as running:
        yield running


def ask(server: Server, model: str, tokens: int, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": model, "messages": messages, "max_tokens": tokens, "ignore_eos": True, **fields}
    return httpx.post(server.base_url + CHAT, json=body, timeout=PATIENCE_S)


def is_whole(answer: httpx.Response, model: str) -> bool:
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        ends = [one["choices"][0]["finish_reason"] for one in events if one.get("choices")]
        return (
            answer.text.endswith("data: [DONE]\n\n") and ends[-1] == "length" and events[0]["model"] == model
        )
    found = answer.json()
    return bool(found["model"] == model and found["choices"][0]["finish_reason"] == "length")


def metrics(server: Server, name: str) -> dict[str, float]:
    """By the value of the first label."""
    lines = httpx.get(server.base_url + "/metrics", timeout=PATIENCE_S).text.splitlines()
    found = [line for line in lines if line.startswith(f"moeserve:{name}{{")]
    return {line.split('"')[1]: float(line.rpartition(" ")[2]) for line in found}


def unload(server: Server, model: str) -> None:
    httpx.post(f"{server.base_url}/models/unload", json={"model": model}, timeout=PATIENCE_S)
    while httpx.get(f"{server.base_url}/v1/models/{model}", timeout=PATIENCE_S).json()["state"] != "unloaded":
        time.sleep(0.05)


def pss(processes: Iterable[psutil.Process]) -> int:
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def planned(server: Server) -> tuple[int, bool]:
    """Returns the memory that is planned for the models which are loaded now, with what all share; and whether some
    are, and none is being loaded or stopped."""
    cards = httpx.get(server.base_url + "/v1/models", timeout=PATIENCE_S).json()["data"]
    loaded = [card["memory_bytes"]["ram"] for card in cards if card["state"] in ("loaded", "closing")]
    is_settled = bool(loaded) and not {card["state"] for card in cards} & {"loading", "stopping"}
    return COMMON_BYTES + sum(loaded), is_settled


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return float(sum(one.user + one.system for one in times))


def test_requests_by_turns_are_all_answered_and_a_kill_touches_no_other(server: Server) -> None:
    """Three models in turn by six clients. One's processes are killed after half of the requests."""
    front = server.named("front")
    done: list[int] = []
    killed = threading.Event()

    def ask_in_turn(place: int) -> tuple[str, httpx.Response]:
        if len(done) >= REQUESTS // 2 and not killed.is_set():
            killed.set()
            for launcher in front.children():
                if title_of(launcher) == "moeserve: launcher":
                    launcher.kill()
                    break
        model = "abc"[place % 3]
        answer = ask(server, model, 16)
        done.append(place)
        return model, answer

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(ask_in_turn, range(REQUESTS)))
    loads, evictions, losses = (
        metrics(server, f"model_{name}_total") for name in ("loads", "evictions", "losses")
    )
    print(f"{len(answers)} requests, loads {loads}, evictions {evictions}, losses {losses}")
    assert [answer.text for model, answer in answers if answer.status_code != 200] == []
    assert all(is_whole(answer, model) for model, answer in answers)
    assert killed.is_set()
    assert server.named("front").pid == front.pid
    assert sum(losses.values()) <= 1, "no other has ended by itself"
    assert sum(loads.values()) >= 3
    # Each load but the first two, and one after the kill, takes the place of a model that makes room.
    assert sum(loads.values()) - sum(evictions.values()) <= 3


def test_eight_clients_on_four_models(server: Server) -> None:
    ends = time.monotonic() + TURNS_S
    wrong: list[str] = []
    taken: list[tuple[int, int]] = []  # bytes, and planned bytes

    def client(seed: int) -> int:
        chance = random.Random(seed)
        count = 0
        while time.monotonic() < ends:
            model = chance.choice("abcd")
            answer = ask(server, model, chance.randrange(4, 120), stream=chance.random() < 0.5)
            if answer.status_code != 200 or not is_whole(answer, model):
                wrong.append(answer.text)
            count += 1
        return count

    def watch() -> None:
        while time.monotonic() < ends or not taken:
            time.sleep(1.0)
            before, was_settled = planned(server)
            memory = pss(server.processes())
            if was_settled and planned(server) == (before, True):
                taken.append((memory, before))

    watching = threading.Thread(target=watch)
    watching.start()
    with ThreadPoolExecutor(CLIENTS) as pool:
        counts = list(pool.map(client, range(CLIENTS)))
    watching.join()
    waited = metrics(server, "model_most_swaps_waited")
    loads = metrics(server, "model_loads_total")
    shares = sorted(memory / plan for memory, plan in taken)
    print(
        f"{sum(counts)} requests, loads {loads}, waited {waited}; PSS {max(taken)[0] >> 20} MiB at most, of what is"
    )
    print(
        f"planned {shares[0]:.3f} to {shares[-1]:.3f}, median {statistics.median(shares):.3f}, {len(shares)} samples"
    )
    assert not wrong, wrong[:3]
    assert min(counts) >= 1
    assert max(waited.values()) <= MOST_SWAPS
    assert statistics.median(shares) <= MOST_TAKEN
    assert sum(metrics(server, "model_losses_total").values()) == 0


def test_a_swap_costs_no_more_than_a_plain_start(models: Path, server: Server) -> None:
    """In CPU seconds of the model's processes until its first answer: other work on the machine changes them little."""
    (front,) = [one for one in server.processes() if title_of(one) == "moeserve: front"]
    plain, swapped = [], []
    for model in "abc":
        with running_server(models / f"{model}.gguf", *POOL) as alone:
            answer = alone.post("/v1/completions", {"prompt": "Once", "max_tokens": 1})
            assert answer["choices"]
            plain.append(cpu_seconds(alone.processes()))
        before = {one.pid for one in front.children()}
        assert ask(server, model, 1).status_code == 200
        (launcher,) = [
            one for one in front.children() if one.pid not in before and title_of(one) == "moeserve: launcher"
        ]
        swapped.append(cpu_seconds([launcher, *launcher.children(recursive=True)]))
    print(f"CPU seconds: plain {plain}, swapped {swapped}")
    assert statistics.median(swapped) <= 1.3 * statistics.median(plain)


def test_kv_of_an_unloaded_model_survives_on_disk(server: Server) -> None:
    text = "The sailor told the same long story of the northern sea to everyone who would listen. " * 12

    def cached() -> int:
        answer = ask(server, "a", 4, messages=[{"role": "user", "content": text}])
        assert answer.status_code == 200, answer.text
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    own = f"{server.base_url}/metrics?model=a"
    while 'kv_disk_pages{model_name="a"} 0.0' in httpx.get(own, timeout=PATIENCE_S).text:
        time.sleep(0.1)  # they are written behind
    time.sleep(2.0)
    unload(server, "a")
    assert ask(server, "b", 1).status_code == 200
    assert cached() >= 64


def test_one_model_has_the_processes_of_one_model(models: Path) -> None:
    with running_server(models / "a.gguf", *POOL) as alone:
        titles = {title_of(one) for one in alone.processes()}
        assert not {title for title in titles if "front" in title}
        assert sum(title == "moeserve: launcher" for title in map(title_of, alone.processes())) == 1
        sockets = [one for process in alone.processes() for one in process.net_connections(kind="unix")]
        assert not [one for one in sockets if "/model-" in str(one.laddr)], "no hop in between"
