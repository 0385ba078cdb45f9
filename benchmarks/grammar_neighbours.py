"""What grammars of one API key cost the streams of another.

    python -m benchmarks.grammar_neighbours

1. A stream's tokens a second, alone, and beside one request with n = 63 whose grammar is ambiguous: the longer its
   answers, the longer each of their masks takes, or one in six of them.
   Beside it the same request without a grammar, which tells what 63 rows cost by themselves.
2. A stream's longest pause while another key sends 60 different schemas of 63 kB, eight at a time.

`--checkout` measures another checkout's server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from tests.support.servers.server import REPOSITORY, Server, stream_events

MODEL = REPOSITORY / "tests" / "fixtures" / "tiny-qwen3moe-q4_k_m.gguf"
AMBIGUOUS = 'start: s\ns: s s | A |\nA: "a"'
# The masks in front of a letter take long, those inside of the digits nearly nothing; all choices are there together.
NOW_AND_THEN = 'start: s\ns: s s | D | L\nD: "123456"\nL: /[a-z ]/'
NUM_SCHEMAS, SCHEMA_BYTES, AT_ONCE = 60, 63_000, 8
KEYS = ("one", "another")
# httpx would make one for each request: 100 ms of CPU of this process, which takes the stream's times.
CONTEXT = httpx.create_ssl_context()


def ask(server: Server, key: str, body: dict[str, Any], *, timeout: float = 120.0) -> int:
    """The status of an answer that is not streamed."""
    headers = {"authorization": f"Bearer {key}"}
    url = server.base_url + "/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=timeout, verify=CONTEXT).status_code


def token_times(server: Server, is_over: Callable[[], bool]) -> list[float]:
    """When the tokens of one stream after another came, of the first key, until `is_over`."""
    times = [time.monotonic()]
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.Client(timeout=120, headers=headers, verify=CONTEXT) as client:
        while not is_over():
            with client.stream("POST", server.base_url + "/v1/completions", json=body) as response:
                for _ in stream_events(response):
                    times.append(time.monotonic())
                    if is_over():
                        break
    return times


def report(title: str, times: list[float]) -> None:
    pause = max(later - earlier for earlier, later in itertools.pairwise(times))
    rate = (len(times) - 1) / (times[-1] - times[0])
    print(f"{title}: {rate:.1f} tokens a second, longest pause {pause:.2f} s", flush=True)


def for_seconds(seconds: float) -> Callable[[], bool]:
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def beside_a_crowd(server: Server, seconds: float, what: str, grammar: str | None) -> None:
    bias = {str(token): 20 for token in tokens_of(server, "a" if grammar != NOW_AND_THEN else "1")}
    body = {
        "messages": [{"role": "user", "content": "go"}],
        "n": 63,
        "max_tokens": 1500,
        "temperature": 0,
        "logit_bias": bias,
    }
    body |= {} if grammar is None else {"structured_outputs": {"grammar": grammar}}

    def crowd() -> None:
        with suppress(httpx.TimeoutException):
            print("the crowd ends with", ask(server, KEYS[1], body, timeout=seconds + 10))

    thread = threading.Thread(target=crowd)
    thread.start()
    time.sleep(2)
    before = generated(server)
    times = token_times(server, for_seconds(seconds))
    others = (generated(server) - before - len(times) + 1) / seconds
    report(f"beside 63 {what} ({others:.0f} tokens a second), for {seconds:g} s", times)
    thread.join()


def generated(server: Server) -> float:
    return server.metrics()["moeserve:generation_tokens_total"]


def tokens_of(server: Server, text: str) -> list[int]:
    headers = {"authorization": f"Bearer {KEYS[0]}"}
    body = {"prompt": text, "add_special_tokens": False}
    return list(httpx.post(server.base_url + "/tokenize", json=body, headers=headers).json()["tokens"])


def schema(number: int) -> dict[str, Any]:
    """One of SCHEMA_BYTES, unlike the others."""
    names = [f"field_{number}_{i}" for i in range(250)]
    made = {
        "type": "object",
        "properties": {name: {"type": "string", "pattern": "^[a-z]{1,20}$"} for name in names},
    }
    made["required"] = names[:1]
    made["description"] = "x" * max(SCHEMA_BYTES - len(json.dumps(made)), 0)
    return made


def beside_many_schemas(server: Server) -> None:
    def send(number: int) -> int:
        form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema(number), "strict": True}}
        messages = [{"role": "user", "content": "go"}]
        return ask(server, KEYS[1], {"messages": messages, "max_tokens": 2, "response_format": form})

    started = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [pool.submit(send, number) for number in range(NUM_SCHEMAS)]
        times = token_times(server, lambda: all(answer.done() for answer in answers))
    statuses = sorted({answer.result() for answer in answers})
    taken = time.monotonic() - started
    report(f"beside {NUM_SCHEMAS} schemas, answered with {statuses} in {taken:.1f} s", times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--checkout", type=Path, default=REPOSITORY)
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    server = Server(arguments.model, *keys, checkout=arguments.checkout)
    try:
        report("alone", token_times(server, for_seconds(5.0)))
        beside_many_schemas(server)
        beside_a_crowd(server, arguments.seconds, "answers without a grammar", None)
        beside_a_crowd(server, arguments.seconds, "ambiguous grammars", AMBIGUOUS)
        beside_a_crowd(server, arguments.seconds, "that are costly now and then", NOW_AND_THEN)
    finally:
        server.kill()


if __name__ == "__main__":
    main()
