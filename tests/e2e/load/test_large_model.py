"""A model of real shape (set MOESERVE_LARGE_MODEL): a long prompt, streams at once, and the memory of it all."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from moeserve.kv.layout import KvLayout
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from tests.e2e.completions import TEXT, at_once, completion, streamed
from tests.support.servers.server import running_server

KV_TOKENS = 16384
OVERHEAD_BYTES = 1 << 30


@contextmanager
def peak_of_children() -> Iterator[list[int]]:
    """Holds the largest memory of all our descendants together, in bytes; shared pages count once (PSS)."""
    peak = [0]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.1):
            total = 0
            for process in psutil.Process().children(recursive=True):
                try:
                    total += process.memory_full_info().pss
                except psutil.NoSuchProcess:
                    continue  # it ended between the two calls
            peak[0] = max(peak[0], total)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_real_shape_within_its_memory() -> None:
    named = os.environ.get("MOESERVE_LARGE_MODEL")
    if not named:
        pytest.skip("no model of real shape is named (MOESERVE_LARGE_MODEL)")
    model = open_gguf(Path(named))
    kv_bytes = KV_TOKENS * KvLayout(read_shape(model)).token_bytes()
    allowed = model.file_bytes + kv_bytes + OVERHEAD_BYTES
    started = time.monotonic()
    with (
        peak_of_children() as peak,
        running_server(Path(named), "--max-total-tokens", str(KV_TOKENS), ready_timeout=300) as server,
    ):
        ready = time.monotonic() - started
        prompt = server.post("/tokenize", {"prompt": TEXT * 250})["tokens"][:2000]
        assert len(prompt) == 2000
        answer = server.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": 16, "ignore_eos": True}, timeout=300
        )
        alone = [completion(server, prompt=prompt[i : i + 20], max_tokens=32)["text"] for i in range(8)]

        def ask(i: int) -> str:
            events = streamed(server, prompt=prompt[i : i + 20], max_tokens=32)
            return "".join(event["choices"][0]["text"] for event in events)

        began = time.monotonic()
        assert at_once(ask, range(8)) == alone
        rate = 8 * 32 / (time.monotonic() - began)
    print(
        f"\nready in {ready:.1f} s; prefill {answer['timings']['prefill_tokens_per_second']:.0f} tok/s, decode "
        f"{answer['timings']['decode_tokens_per_second']:.1f} tok/s; 8 streams {rate:.1f} tok/s; peak "
        f"{peak[0] / 2**30:.2f} GiB of {allowed / 2**30:.2f} allowed"
    )
    assert peak[0] <= allowed
