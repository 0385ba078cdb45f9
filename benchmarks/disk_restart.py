"""A prompt of before a kill -9: its first token from --kv-disk beside its first token computed.

    python -m benchmarks.family_file 12-layers.gguf --shape qwen3-30b-a3b --layers 12
    python -m benchmarks.disk_restart --model 12-layers.gguf [--tokens 25000] [--threads 2]

A server computes the prompt and answers with 16 greedy tokens. Every process of it is killed while another answer is
under way, once the pages are on disk. The next server on the same folder is asked the same. Weights are random, of the
file's shapes and types. Printed: the time to the first token of each, and whether the answers are equal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.support.clients.streams import Answer, ask, client, prompt_ids
from tests.support.servers.server import Server, running_server

ANSWER = 16
PAGE_TOKENS = 32


@dataclass(frozen=True)
class Asked:
    ttft_s: float
    tokens: list[str]
    cached: int


async def _ask(server: Server, prompt: list[int]) -> Asked:
    async with client(server) as http:
        answer = await ask(http, prompt, max_tokens=ANSWER)
    return Asked(answer.ttft, answer.tokens, answer.cached)


async def _kill_amid(server: Server, prompt: list[int]) -> None:
    """Kills every process of a server while it answers."""
    async with client(server) as http:
        into = Answer(sent=time.perf_counter())
        task = asyncio.create_task(ask(http, prompt, into, max_tokens=500))
        while not into.times:
            await asyncio.sleep(0.01)
        server.kill()
        await asyncio.gather(task, return_exceptions=True)


def _flags(options: argparse.Namespace, folder: str) -> list[str]:
    most = options.tokens + 1024
    sizes = ["--max-num-seqs", "4", "--max-model-len", str(most), "--max-total-tokens", str(2 * most)]
    return ["--load-format", "dummy", "--threads", str(options.threads), "--kv-disk", folder, *sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=25_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--folder", help="where the disk to be measured is (default: that of temporary files)"
    )
    options = parser.parse_args()
    prompt = prompt_ids(options.tokens, seed=0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        flags = _flags(options, f"{folder}/tier")
        print(f"load {os.getloadavg()[0]:.1f}, {options.tokens} tokens", flush=True)
        first = Server(options.model, *flags, ready_timeout=200)
        try:
            computed = asyncio.run(_ask(first, prompt))
            print(f"computed: {computed.ttft_s:.2f} s, load {os.getloadavg()[0]:.1f}", flush=True)
            while first.metrics()["moeserve:kv_disk_pages"] < options.tokens // PAGE_TOKENS:
                time.sleep(0.05)
            asyncio.run(_kill_amid(first, prompt[:100]))
        finally:
            first.kill()
        with running_server(options.model, *flags, ready_timeout=200) as second:
            loaded = asyncio.run(_ask(second, prompt))
            metrics = second.metrics()
        print(
            f"after the restart: {loaded.ttft_s:.2f} s, {100 * loaded.ttft_s / computed.ttft_s:.2f}%, "
            f"{loaded.cached} tokens from disk, {metrics['moeserve:kv_disk_read_bytes_total'] / 1e6:.0f} MB in "
            f"{metrics['moeserve:kv_disk_load_seconds_total']:.2f} s, load {os.getloadavg()[0]:.1f}"
        )
        print("answers are equal" if loaded.tokens == computed.tokens else "ANSWERS DIFFER")


if __name__ == "__main__":
    main()
