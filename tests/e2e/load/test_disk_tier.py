"""The prefix cache's tier on disk: what a killed server has computed, the next one reads."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import OWN_FIXTURES, TEST_DEVICE
from tests.e2e.completions import TEXT
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

PROMPT = TEXT * 6
PAGE_TOKENS = 32

pytestmark = pytest.mark.one_gpu("there is no tier on disk with several GPUs")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("disk") / "tier"


def ask(server: Server, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0, **more}
    return server.post("/v1/completions", body)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def written(server: Server, pages: int) -> None:
    """Waits until so many pages are on disk: they are written behind."""
    assert within(30, lambda: server.metrics()["moeserve:kv_disk_pages"] >= pages)


@pytest.fixture(scope="module")
def first_answers(folder: Path) -> list[dict[str, Any]]:
    """The answers of a server that is killed after them, while it writes another."""
    server = Server(None, "--kv-disk", str(folder), "--kv-disk-gib", "0.5")
    try:
        answers = [ask(server, PROMPT), ask(server, PROMPT + "And", cache_salt="a")]
        tokens = answers[0]["usage"]["prompt_tokens"]
        assert [cached(answer) for answer in answers] == [0, 0]
        written(server, 2 * (tokens // PAGE_TOKENS))
    finally:
        server.kill()
    return answers


@pytest.fixture(scope="module")
def restarted(folder: Path, first_answers: list[dict[str, Any]]) -> Iterator[Server]:
    more = ("--max-engine-crashes", "10")
    with running_server(None, "--kv-disk", str(folder), "--kv-disk-gib", "0.5", *more) as server:
        yield server


def test_a_prompt_of_before_comes_from_disk(restarted: Server, first_answers: list[dict[str, Any]]) -> None:
    before = first_answers[0]
    again = ask(restarted, PROMPT)
    tokens = before["usage"]["prompt_tokens"]
    assert again["choices"][0]["text"] == before["choices"][0]["text"]
    assert cached(again) == (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    assert again["timings"]["disk_tokens"] == cached(again)
    # the router tells its counters behind its answers
    assert within(30, lambda: restarted.metrics()["moeserve:kv_disk_tokens_total"] == cached(again))
    assert restarted.metrics()["moeserve:kv_disk_read_bytes_total"] > 0
    third = ask(restarted, PROMPT)
    assert cached(third) == tokens - 1
    assert third["timings"]["disk_tokens"] == 0


def test_a_salt_is_part_of_the_key(restarted: Server) -> None:
    # A new router has measured no rate yet, and tries the tier: on a busy machine computing this model is as fast.
    restarted.named("router").kill()
    assert cached(ask(restarted, PROMPT, cache_salt=uuid.uuid4().hex)) == 0
    assert cached(ask(restarted, PROMPT, cache_salt="a")) > 0


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "router",
            marks=pytest.mark.cpu_engine("a GPU computes this sooner than the disk reads it"),
        ),
        "worker",
    ],
)
def test_another_process_comes_back_to_its_pages(restarted: Server, name: str) -> None:
    answer = ask(restarted, PROMPT)
    restarted.named(name).kill()
    again = ask(restarted, PROMPT)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    assert again["timings"]["disk_tokens"] > 0


@pytest.mark.slow
def test_a_killed_server_of_a_recurrent_model(tmp_path: Path) -> None:
    """States go to disk with their pages, and the answer goes on from there. Whole, in two processes, without a kill:
    tests/worker/memory/test_recurrent_cache.py."""
    model = OWN_FIXTURES / "tiny-qwen3next-q4_k_m.gguf"
    golden = json.loads((OWN_FIXTURES / f"{model.stem}.golden.json").read_text())
    tokens = [token for case in golden["cases"] for token in case["tokens"]][:300]
    body = {"prompt": tokens, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    flags = (model, "--kv-disk", str(tmp_path / "tier"))
    first = Server(*flags)
    try:
        whole = first.post("/v1/completions", body)
        # Again from a state, as later from disk: a GPU may round a prompt that is computed whole differently.
        answer = first.post("/v1/completions", body)
        assert TEST_DEVICE == "cuda" or answer["choices"][0]["text"] == whole["choices"][0]["text"]
        written(first, len(tokens) // PAGE_TOKENS + 1)
    finally:
        first.kill()
    with running_server(*flags) as second:
        again = second.post("/v1/completions", body)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    point = (len(tokens) - 8) // PAGE_TOKENS * PAGE_TOKENS
    assert again["timings"]["disk_tokens"] == cached(again) == point


@pytest.mark.slow
def test_damaged_pages_are_computed_again(restarted: Server, folder: Path) -> None:
    answer = ask(restarted, PROMPT)
    restarted.named("worker").kill()
    ask(restarted, "Hello")
    for path in folder.glob("segment-*.kv"):
        data = bytearray(path.read_bytes())
        for at in range(5000, len(data), 10_000):
            data[at] ^= 1
        with path.open("r+b") as file:  # the same file, which the server has open
            file.write(data)
    again = ask(restarted, PROMPT)
    assert again["choices"][0]["text"] == answer["choices"][0]["text"]
    assert again["timings"]["disk_tokens"] == 0
    assert restarted.log.count("a page has changed since it was written") == 1
    assert within(30, lambda: restarted.metrics()["moeserve:kv_disk_failed_pages_total"] > 0)
