"""What a GPU's step with drafts by the model's own block is made of, for one request.

`python -m benchmarks.gpu.step_profile --drafts` prints it, of a header without weights. First whole steps by wall
clock: without drafts, each launched ahead, and with drafts that are all accepted, 88% of them, and none, then the
host's milliseconds from one event of a step to the next. Last, by CUDA events, the GPU's time of the CUDA graphs: of
the layers for one row and for one row with its drafts, and of a link of the chain that drafts, with the whole
vocabulary and with a shortlist.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from moeserve.cli.bench import engine as bench
from moeserve.cli.bench.drafts import DraftedDecode, room_of
from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.head_shortlist import frequent_tokens
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.next_token_chain import ChainStart
from moeserve.worker.engines.gpu.steps.cuda_graphs import replay_ms
from moeserve.worker.engines.gpu.steps.step_path import GraphFamily, GraphKey, padded_size
from moeserve.worker.loading.load import load_runner

PROMPT, REPLAYS = 16, 40


def print_graphs(engine: GpuEngine, drafts: int) -> None:
    """The graphs read what the last steps left in their buffers."""
    chain = engine.next_token_chain
    assert chain is not None
    kinds: tuple[tuple[GraphFamily, int], ...] = (
        ("decode", 1),
        ("small", padded_size(1 + drafts, engine.facts.sizes)),
    )
    for family, size in kinds:
        replay = engine._graphs.find(GraphKey(family, size, AdapterScope.NONE))
        if replay is not None:
            print(f"layers and head, {size} rows: {replay_ms(replay, REPLAYS):6.3f} ms", flush=True)
    for panels in (None, np.arange(frequent_tokens(chain.vocab_size) // 32, dtype=np.int32)):
        one = np.ones(1, np.int32)
        chain.draft(ChainStart(one, one, one - 1, one * drafts, np.ones((drafts, 1), np.int32), panels))
        replay = chain._links.get((1, panels is not None))
        if replay is not None:
            name = "whole vocabulary" if panels is None else f"{len(panels)} panels"
            # Behind a chain's last link its rows stay where they are.
            print(f"link, {name}: {replay_ms(partial(relink, chain, replay), REPLAYS):6.3f} ms", flush=True)


def relink(chain: Any, replay: Callable[[], None]) -> None:
    chain._block.chain.rows.depth.zero_()
    replay()


class Timeline:
    """Notes when the host passes the ends of these methods."""

    def __init__(self) -> None:
        self._last: tuple[str, float] | None = None
        self.spans: dict[tuple[str, str], list[float]] = defaultdict(list)

    def note(self, name: str) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.spans[self._last[0], name].append((now - self._last[1]) * 1e3)
        self._last = name, now

    def watch(self, owner: Any, method: str, name: str) -> None:
        inner = getattr(owner, method)

        def noted(*args: Any, **more: Any) -> Any:
            found = inner(*args, **more)
            self.note(name)
            return found

        setattr(owner, method, noted)

    def print_medians(self) -> None:
        for (before, after), spans in self.spans.items():
            if len(spans) > 8:
                print(f"    {before:>16} -> {after:<16} {statistics.median(spans):6.3f} ms x {len(spans)}")


def profile_drafts(model: str, drafts: int, steps: int = 64) -> None:
    """drafts: of each step."""
    began = time.monotonic()
    drafting = f'{{"method": "mtp", "num_speculative_tokens": {drafts}}}'
    arguments = [
        "--model", model, "--load-format", "dummy", "--device", "cuda", "--batch", "1", "--acceptance", "1",
        "--prompt", str(PROMPT), "--gen", str(room_of(4 * steps, drafts)), "--temperature", "1",
        "--max-num-batched-tokens", str(PROMPT), "--speculative-config", drafting,
    ]  # fmt: skip
    config = bench._config(bench.command_parser().parse_args(arguments))
    runner = load_runner(config, lambda *_: None, 0)
    engine = runner.engine
    assert isinstance(engine, GpuEngine)
    print(f"loaded in {time.monotonic() - began:.0f} s; {runner.ready().device}", flush=True)
    driver = bench.EngineBench(runner, PROMPT, temperature=1.0)
    driver.prefill(1, PROMPT)
    driver.decode(1, PROMPT, 4)
    ms = driver.decode(1, PROMPT + 4, steps) / steps * 1e3
    print(f"a step without drafts: {ms:.3f} ms", flush=True)
    drafted = DraftedDecode(driver, runner, drafts)
    timeline = Timeline()
    for right in (1.0, 0.88, 0.0):
        driver.prefill(1, PROMPT)
        if right == 0.0:
            timeline.watch(engine._choice, "read", "tokens read")
            timeline.watch(engine.next_token_chain, "launch", "chain launched")
            timeline.watch(engine._launcher, "launch", "layers launched")
            timeline.watch(runner, "finish", "step finished")
        seconds, tokens = drafted.run(1, PROMPT, steps, right)
        each = seconds * 1e3 / tokens
        print(
            f"{right:.0%} right: {each:.3f} ms a token, {1e3 / each:.0f} tok/s, {ms / each:.2f} of none",
            flush=True,
        )
    timeline.print_medians()
    print_graphs(engine, drafts)
