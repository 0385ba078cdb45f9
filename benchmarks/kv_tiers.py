"""Conversations that a GPU's KV pool cannot hold: later turns with the tier in RAM (or on disk), and without.

    python -m benchmarks.kv_tiers --layers 12 --conversations 64 --turns 8 --pool 6

The real scheduler and a real worker in one process, Qwen3-30B-A3B's shape with random weights (Q4_K_M mix). Some
conversations at a time are served, each turn of all before the next turn of any, so that nearly every turn finds that
others have taken the place of its KV.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import tempfile
import time
from collections import deque
from pathlib import Path
from statistics import median

from benchmarks.header import qwen3moe, write_header
from benchmarks.streams import percentile
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.messages.schema import GenerateRequest, TokensItem, TokensOut
from moeserve.messages.steps import StepPlan
from moeserve.router.__main__ import limits
from moeserve.router.core.scheduler import Scheduler
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner

QUESTION, ANSWER = 96, 32  # tokens
IDS = range(300, 4000)


@dataclasses.dataclass
class Figures:
    ttft: list[float] = dataclasses.field(default_factory=list)  # seconds, of later turns
    gaps: list[float] = dataclasses.field(default_factory=list)  # between tokens
    prompt: int = 0  # tokens of later turns
    ram: int = 0
    disk: int = 0
    cached: int = 0
    seconds: float = 0.0


class Conversations:
    """Drives one scheduler and one worker."""

    def __init__(self, runner: Runner, config: ServerConfig, *, with_tiers: bool) -> None:
        self._runner = runner
        bounds = limits(config, runner.ready())
        if not with_tiers:
            bounds = dataclasses.replace(bounds, page_tokens=0)
        self.scheduler = Scheduler(bounds)
        self._in_flight: deque[StepPlan] = deque()
        self._waiting: deque[int] = deque()
        self._sent: dict[int, float] = {}
        self._last: dict[int, float] = {}
        self.figures = Figures()

    def run(self, conversations: int, first: int, turns: int, at_once: int) -> Figures:
        rng = random.Random(0)
        self._histories = [[rng.choice(IDS) for _ in range(first)] for _ in range(conversations)]
        started = time.perf_counter()
        for turn in range(turns):
            self._turn = turn
            self._waiting.extend(range(conversations))
            for _ in range(at_once):
                self._next()
            while self._sent:
                self._step()
            for history in self._histories:
                history += [rng.choice(IDS) for _ in range(QUESTION)]
        self.figures.seconds = time.perf_counter() - started
        return self.figures

    def _next(self) -> None:
        if not self._waiting:
            return
        number = self._waiting.popleft()
        id, now = 1000 * self._turn + number, time.monotonic()
        tokens = b"".join(token.to_bytes(4, "little") for token in self._histories[number])
        sampling = SamplingParams(max_tokens=ANSWER, temperature=0.0)
        self._sent[id] = time.perf_counter()
        self.scheduler.add(
            GenerateRequest(id=id, token_ids=tokens, sampling=sampling, text=TextOptions(), arrival=now)
        )

    def _step(self) -> None:
        while (plan := self.scheduler.plan(time.monotonic())) is not None:
            self._in_flight.append(plan)
        if self._in_flight:
            result = self._runner.step(self._in_flight.popleft())
            self.scheduler.step_result(result, time.monotonic())
        now = time.perf_counter()
        for message in self.scheduler.take_messages():
            if isinstance(message, TokensOut):
                for item in message.items:
                    self._item(item, now)

    def _item(self, item: TokensItem, now: float) -> None:
        turn, number = divmod(item.id, 1000)
        if item.token_ids:
            if item.id in self._last:
                self.figures.gaps.append(now - self._last[item.id])
            elif turn:
                self.figures.ttft.append(now - self._sent[item.id])
            self._last[item.id] = now
            self._histories[number] += item.token_ids
        if item.usage is not None:
            if turn:
                usage = item.usage
                self.figures.prompt += usage.prompt_tokens
                self.figures.cached += usage.cached_tokens
                self.figures.ram += usage.ram_tokens
                self.figures.disk += usage.disk_tokens
            del self._sent[item.id]
            self._next()


def load(args: argparse.Namespace, folder: str) -> tuple[Runner, ServerConfig]:
    path = Path(folder) / "model.gguf"
    write_header(path, qwen3moe(num_layers=args.layers))
    longest = args.first + args.turns * (QUESTION + ANSWER)
    config = resolve(
        ServerConfig(
            model=str(path),
            load_format="dummy",
            device=args.device,
            max_num_seqs=16,
            max_model_len=longest,
            max_total_tokens=args.pool * longest,
            kv_ram=None if args.device == "cpu" else args.kv_ram,
            kv_disk=args.kv_disk,
        )
    )
    started = time.perf_counter()
    runner = load_runner(config, lambda *_: None)
    print(
        f"loaded in {time.perf_counter() - started:.0f} s: {runner.ready().device}, {runner.ready().kv_tiers}"
    )
    return runner, config


def main() -> None:
    parser = argparse.ArgumentParser(description="Conversations that a GPU's KV pool cannot hold.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--first", type=int, default=2048, help="tokens of a conversation's first prompt")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument(
        "--pool", type=int, default=6, help="conversations that the KV pool holds at their ends"
    )
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--kv-ram", type=float, default=8.0, metavar="GIB")
    parser.add_argument("--kv-disk", metavar="FOLDER")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runner, config = load(args, folder)
    print(
        f"{'':<16}{'s':>8}{'TTFT ms':>9}{'p95':>8}{'gap ms':>8}{'p99':>8}{'cached':>8}{'RAM':>7}{'disk':>7}"
    )
    for with_tiers in (False, True):
        world = Conversations(runner, config, with_tiers=with_tiers)
        found = world.run(args.conversations, args.first, args.turns, args.at_once)
        gaps = sorted(found.gaps)
        print(
            f"{'with tiers' if with_tiers else 'without tiers':<16}{found.seconds:>8.1f}"
            f"{median(found.ttft) * 1e3:>9.1f}{percentile(sorted(found.ttft), 0.95) * 1e3:>8.1f}"
            f"{median(gaps) * 1e3:>8.2f}{percentile(gaps, 0.99) * 1e3:>8.1f}"
            f"{found.cached / found.prompt:>8.1%}{found.ram / found.prompt:>7.1%}{found.disk / found.prompt:>7.1%}"
        )
        runner.router_lost()
    report = world.scheduler.load_report()
    for name, counts in (("RAM", report.ram), ("disk", report.disk)):
        rate = counts.bytes_read / max(counts.load_ms, 1e-9) * 1e3 / GIB
        print(
            f"{name}: {counts.pages} pages, {counts.bytes_written / GIB:.2f} GiB written, "
            f"{counts.bytes_read / GIB:.2f} GiB read at {rate:.1f} GiB/s, {counts.declined} declined, "
            f"{counts.failed_pages} failed"
        )


if __name__ == "__main__":
    main()
