"""An answer under way while a long prompt is read: what each costs the other, for several shares of the time.

    python -m benchmarks.decode_interference --model model.gguf --prompt 16000 --max-itl-ms 250

Alone first: the speed of the answer, and the time to first token of the prompt. Then together. Both share one engine,
so the speed kept and the time share of the prompt (alone / together) add up to about 1.

    python -m benchmarks.decode_interference --batch 10000 --streams 8 --pairs 12

Streams beside a batch of 10,000 lines and without it, in windows by turns. Printed: tokens a second of all streams
alone and beside the batch, the quotient, the batch's lines a second, and the machine's load.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks import batch_windows
from tests.support.clients.streams import Answer, ask, client, percentile, prompt_ids, until
from tests.support.servers.server import Server, running_server

ALONE_S = 4.0  # for which the answer runs alone before the prompt comes
WINDOW_S = 2.0


async def measure(server: Server, length: int, answer_tokens: int) -> str:
    """One line of the table."""
    async with client(server) as http:
        await ask(http, prompt_ids(64, seed=0), max_tokens=16)  # first touch of everything
        alone = (await ask(http, prompt_ids(length, seed=1), max_tokens=1)).ttft
        answer = Answer(time.perf_counter())
        task = asyncio.create_task(ask(http, prompt_ids(32, seed=2), answer, max_tokens=answer_tokens))
        await until(lambda: answer.times)
        await asyncio.sleep(ALONE_S)
        begin = time.perf_counter()
        speed = answer.speed(begin - ALONE_S + 0.5, begin)
        prompt = await ask(http, prompt_ids(length, seed=3), max_tokens=1)
        end = prompt.times[0]
        if task.done():
            raise RuntimeError("the answer ended first: a longer --answer-tokens is needed")
        task.cancel()
    kept = answer.speed(begin, end) / speed
    window = min(WINDOW_S, end - begin)
    starts = [begin + i * window / 4 for i in range(int((end - begin - window) / window * 4) + 1)]
    worst = min(answer.speed(start, start + window) for start in starts) / speed
    gaps = answer.gaps(begin, end)
    return (
        f"{speed:>9.1f}{kept:>8.0%}{worst:>9.0%}{percentile(gaps, 0.5) * 1e3:>8.0f}"
        f"{percentile(gaps, 0.99) * 1e3:>8.0f}{gaps[-1] * 1e3:>8.0f}{alone:>9.1f}{prompt.ttft:>9.1f}"
        f"{prompt.ttft / alone:>8.2f}"
    )


def batch_beside_streams(args: argparse.Namespace) -> None:
    print(f"{'alone/s':>9}{'beside':>9}{'kept':>8}{'lines/s':>9}{'load':>7}")
    with tempfile.TemporaryDirectory() as folder:
        flags = batch_windows.flags(Path(folder), args.streams, args.stream_tokens)
        with running_server(args.model, *flags, ready_timeout=300) as server:
            asyncio.run(
                batch_windows.measure_batch(
                    server, args.batch, args.streams, args.stream_tokens, args.window, args.pairs
                )
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="An answer under way while a long prompt is read.")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--prompt", type=int, default=16_000, help="tokens of the long prompt")
    parser.add_argument("--answer-tokens", type=int, default=12_000, help="tokens of the answer at most")
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[0.4], help="--prefill-share, each in a run"
    )
    parser.add_argument("--max-itl-ms", type=float, nargs="+", default=[0], help="0: no limit; each in a run")
    parser.add_argument("--batch", type=int, metavar="LINES", help="a batch instead of a long prompt")
    parser.add_argument("--streams", type=int, default=8, help="beside the batch")
    parser.add_argument(
        "--stream-tokens", type=int, default=400, help="tokens of one answer beside the batch"
    )
    parser.add_argument("--pairs", type=int, default=12, help="of windows with the batch and without")
    parser.add_argument("--window", type=float, default=4.0, help="seconds")
    args = parser.parse_args()
    if args.batch:
        batch_beside_streams(args)
        return
    print(
        f"{'share':>6}{'limit':>7}{'alone/s':>9}{'kept':>8}{'worst 2s':>9}{'p50 ms':>8}{'p99 ms':>8}{'max':>8}"
        f"{'TTFT':>9}{'beside':>9}{'ratio':>8}"
    )
    longest = max(args.prompt, args.answer_tokens) + 200
    for share in args.shares:
        for limit in args.max_itl_ms:
            flags = ["--max-model-len", str(longest), "--max-total-tokens", str(3 * longest)]
            flags += ["--prefill-share", str(share), *(["--max-itl-ms", str(limit)] if limit else [])]
            with running_server(args.model, *flags, ready_timeout=300) as server:
                line = asyncio.run(measure(server, args.prompt, args.answer_tokens))
            print(f"{share:>6}{limit or '-':>7}{line}", flush=True)


if __name__ == "__main__":
    main()
