"""What many clients at once may count on: prefixes computed once, answers that preemptions do not change, nothing left
behind by those who went away, a queue that says when it is full."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import IS_BATCH_INVARIANT
from tests.e2e.completions import at_once, completion, is_empty, running, waiting
from tests.support.clients.streams import client, prompt_ids
from tests.support.servers.server import Server, running_server
from tests.support.servers.waiting import within

CONTEXT, POOL = 1024, 4096  # the pool holds four requests of full length
ANSWER, TIGHT_POOL = 240, 900  # not quite four answers fit
PLACES = 8


@pytest.fixture(scope="module")
def small_pool(tiny_model: Path) -> Iterator[Server]:
    flags = ["--max-model-len", str(CONTEXT), "--max-total-tokens", str(POOL), "--max-num-seqs", "32"]
    with running_server(tiny_model, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def tight_pool(tiny_model: Path) -> Iterator[Server]:
    flags = ["--max-model-len", "300", "--max-total-tokens", str(TIGHT_POOL), "--max-num-seqs", "16"]
    with running_server(tiny_model, *flags) as running:
        yield running


@pytest.fixture(scope="module")
def keyed(tiny_model: Path) -> Iterator[Server]:
    keys = ["--api-key", "one", "--api-key", "two"]
    with running_server(tiny_model, *keys, "--max-num-seqs", str(PLACES)) as running:
        yield running


def ask_as(server: Server, key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(server.base_url + "/v1/completions", json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    return dict(answer.json())


def counter(server: Server, name: str) -> float:
    return server.metrics()["moeserve:" + name]


def cached_tokens(server: Server, prompt: list[int], **body: Any) -> int:
    answer = server.post("/v1/completions", {"prompt": prompt, "max_tokens": 1, "temperature": 0} | body)
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


# ---------------------------------------------------------------- prefixes


@pytest.mark.cpu_engine("a GPU's results depend on how many rows a step has")
def test_a_cached_prefix_gives_bit_identical_logprobs(server: Server) -> None:
    """Cut at every kind of place: before, within and after what another request has left in the cache."""
    stem = prompt_ids(150, seed=1)
    request = {
        "max_tokens": 24,
        "logprobs": 20,
        "return_tokens_as_token_ids": True,
        "temperature": 0.7,
        "seed": 3,
    }
    prompts = [stem[:n] + prompt_ids(5, seed=n) for n in (150, 1, 37, 38, 149)] + [stem]
    fresh = [completion(server, prompt=p, cache_salt=f"once-{i}", **request) for i, p in enumerate(prompts)]
    completion(server, prompt=stem)
    assert [completion(server, prompt=p, **request) for p in prompts] == fresh
    assert at_once(lambda p: completion(server, prompt=p, **request), prompts) == fresh


def test_a_conversation_finds_all_of_its_past(server: Server) -> None:
    so_far = prompt_ids(100, seed=2)
    for turn in range(4):
        answer = server.post(
            "/v1/completions",
            {
                "prompt": so_far,
                "max_tokens": 20,
                "logprobs": 0,
                "ignore_eos": True,
                "return_tokens_as_token_ids": True,
            },
        )
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        # The answer's last token was never computed.
        assert cached == (0 if turn == 0 else len(so_far) - 10 - 1)
        tokens = answer["choices"][0]["logprobs"]["tokens"]
        so_far = (
            so_far
            + [int(token.removeprefix("token_id:")) for token in tokens]
            + prompt_ids(10, seed=10 + turn)
        )


def test_choices_of_one_prompt_compute_it_once(server: Server) -> None:
    before = counter(server, "prefix_cache_hits_total")
    answer = server.post("/v1/completions", {"prompt": prompt_ids(300, seed=4), "n": 8, "max_tokens": 4})
    assert len(answer["choices"]) == 8
    assert counter(server, "prefix_cache_hits_total") - before == 7 * 299


def test_salts_do_not_share(server: Server) -> None:
    prompt = prompt_ids(50, seed=5)
    assert cached_tokens(server, prompt, cache_salt="a") == 0
    assert cached_tokens(server, prompt, cache_salt="b") == 0
    assert cached_tokens(server, prompt, cache_salt="a") == 49


@pytest.mark.slow
def test_a_shared_prompt_stays_in_a_pool_too_small_for_all(small_pool: Server) -> None:
    system = prompt_ids(400, seed=6)
    cached_tokens(small_pool, system)
    for turn in range(4):
        prompts = [system + prompt_ids(200 + 100 * turn, seed=100 + 10 * turn + i) for i in range(8)]
        found = at_once(
            lambda prompt: cached_tokens(small_pool, prompt, max_tokens=60, ignore_eos=True), prompts
        )
        assert min(found) >= 400
    assert within(30, lambda: is_empty(small_pool))


def test_each_keys_cache_can_be_its_own(keyed: Server) -> None:
    body = {"prompt": prompt_ids(50, seed=7), "max_tokens": 1}
    found = [ask_as(keyed, key, body)["usage"] for key in ("one", "two", "one")]
    assert [usage["prompt_tokens_details"]["cached_tokens"] for usage in found] == [0, 0, 49]


# ---------------------------------------------------------------- memory


@pytest.mark.slow
def test_a_pool_that_runs_dry_changes_no_answer(server: Server, tight_pool: Server) -> None:
    """Ten answers of 240 tokens, of which three fit: nobody could know, so most are preempted now and then."""
    requests = [
        {
            "prompt": prompt_ids(40, seed=200 + i),
            "max_tokens": ANSWER,
            "temperature": 0.9 * (i % 2),
            "seed": i,
            "repetition_penalty": 1.1 if i % 3 == 0 else 1.0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        for i in range(10)
    ]
    paused_before = counter(tight_pool, "num_preemptions_total")
    crowded = at_once(lambda request: completion(tight_pool, **request), requests)
    assert counter(tight_pool, "num_preemptions_total") > paused_before
    assert counter(server, "num_preemptions_total") == 0, "undisturbed there"
    for request, answer in list(zip(requests, crowded, strict=True))[::3]:
        alone = completion(server, **request)
        assert alone == answer or not IS_BATCH_INVARIANT
        assert len(alone["logprobs"]["tokens"]) == len(answer["logprobs"]["tokens"]) == ANSWER
    assert within(30, lambda: is_empty(tight_pool))


# ---------------------------------------------------------------- those who go away


async def leave_at_random(server: Server, prompts: list[list[int]], number: int) -> None:
    """So many requests, 24 at a time, each left after 0 to 120 ms, wherever it is then."""
    rng = random.Random(0)
    places = asyncio.Semaphore(24)

    async def one(http: httpx.AsyncClient, prompt: list[int], patience: float) -> None:
        async with places:
            body = {"prompt": prompt, "max_tokens": 100, "temperature": 0, "ignore_eos": True, "stream": True}
            with suppress(TimeoutError):
                async with (
                    asyncio.timeout(patience),
                    http.stream("POST", "/v1/completions", json=body) as response,
                ):
                    async for _ in response.aiter_raw():
                        pass

    async with client(server) as http:
        await asyncio.gather(*(one(http, rng.choice(prompts), rng.uniform(0, 0.12)) for _ in range(number)))


@pytest.mark.slow
def test_a_thousand_clients_that_leave_leave_nothing_behind(tiny_model: Path) -> None:
    """Each prompt and its whole answer is in the cache before: what those who leave computed adds nothing."""
    prompts = [prompt_ids(n, seed=300 + n) for n in (1, 5, 40, 200, 390)]
    flags = ["--max-total-tokens", "16384", "--max-num-seqs", "8"]
    with running_server(tiny_model, *flags) as running:
        for prompt in prompts:
            completion(running, prompt=prompt, max_tokens=100)

        def gauges() -> dict[str, float]:
            metrics = running.metrics()
            names = ("num_requests_running", "num_requests_waiting", "num_tokens_waiting")
            slots = ["kv_cache_slots_used", "kv_cache_slots_total"]
            if IS_BATCH_INVARIANT:  # else those who leave may compute other tokens than the cache has
                slots.append("kv_cache_slots_cached")
            return {name: metrics["moeserve:" + name] for name in (*names, *slots)}

        baseline = gauges()
        assert counter(running, "kv_cache_slots_cached") == sum(len(prompt) + 99 for prompt in prompts)
        asyncio.run(leave_at_random(running, prompts, 1000))
        assert counter(running, "num_aborts_total") > 300
        assert within(30, lambda: gauges() == baseline), gauges()


# ---------------------------------------------------------------- the queue


def test_a_full_queue_says_when_to_come_back(tiny_model: Path) -> None:
    flags = ["--max-num-seqs", "1", "--max-num-queued-reqs", "3"]
    with running_server(tiny_model, *flags) as server, ThreadPoolExecutor(4) as pool:
        completion(server, prompt=[300], max_tokens=20)

        def ask(index: int, max_tokens: int = 1) -> httpx.Response:
            body = {"prompt": [300 + index], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
            return httpx.post(server.base_url + "/v1/completions", json=body, timeout=120)

        long = pool.submit(ask, 0, 1900)
        assert within(30, lambda: running(server) == 1)
        short = [pool.submit(ask, index) for index in range(1, 4)]
        assert within(30, lambda: waiting(server) == 3)
        for refused in at_once(ask, range(4, 12)):
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert refused.json()["error"]["code"] == "overloaded"
        assert [answer.result().status_code for answer in (long, *short)] == [200] * 4


def test_a_busy_key_makes_a_place_for_another(keyed: Server) -> None:
    def ask(key: str, seed: int, max_tokens: int) -> dict[str, Any]:
        body = {"prompt": prompt_ids(20, seed=seed), "max_tokens": max_tokens, "ignore_eos": True}
        return dict(ask_as(keyed, key, body)["timings"])

    busy = [("one", seed, 250) for seed in range(PLACES)]
    *greedy, light = at_once(lambda one: ask(*one), [*busy, ("two", 99, 10)])
    assert light["queue_ms"] < 0.2 * min(timings["decode_ms"] for timings in greedy)
    assert all(timings["completion_tokens"] == 250 for timings in greedy)
