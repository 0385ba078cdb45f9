"""The expert cache on a GPU: decode with routing traces, beside the same placement without it.

    python -m benchmarks.gpu.expert_cache model.gguf --slots 64 32      # a header suffices: family_file

One load for each number of slots. Without the cache the same runner keeps its experts where the placement put them:
these turns are first, because the cache would leave the experts of the very text that they read. Each turn reads
another text, which the cache has not seen; a turn without it and one with it read the same one.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from moeserve.cli.bench.engine import EngineBench, TerminalBar, choosing
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.steps import StepPlan
from moeserve.models.open import open_dummy_model
from moeserve.models.registry import read_shape
from moeserve.placement.expert_cache.generate import PRESETS, generate
from moeserve.placement.expert_cache.routing_trace import RoutingTrace
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.loading.load import load_runner
from moeserve.worker.runner import Runner

PROMPT = 32
BATCHES = (1, 4, 8)
TOPIC = 256  # tokens


def load(model: Path, slots: int, threads: int | None, gen: int) -> Runner:
    length = PROMPT + gen + 1
    config = resolve(
        ServerConfig(
            model=str(model), load_format="dummy", device="cuda", num_gpu_experts=slots, threads=threads,
            gpu_prefill_token_threshold=1 << 20, max_num_seqs=max(BATCHES), max_model_len=length,
            max_total_tokens=max(BATCHES) * length, max_num_batched_tokens=512,
        )
    )  # fmt: skip
    return load_runner(config, TerminalBar(), forced_rows=max(BATCHES))


def rate(runner: Runner, trace: RoutingTrace, batch: int, gen: int) -> tuple[float, str]:
    """Tokens a second of all streams, and what the cache did, of the second half of the steps. In the first half the
    cache sees how often the pool has read experts while it was off, which it takes for misses."""
    bench = EngineBench(runner, 512, trace=trace)
    bench.prefill(batch, PROMPT)
    bench.decode(batch, PROMPT, gen // 2)
    engine = runner.engine
    assert isinstance(engine, GpuEngine)
    cache = engine.expert_cache
    before = None if cache is None else cache.totals
    seconds, steps = _later_half(bench, batch, gen), gen - gen // 2
    did = "" if cache is None or before is None else per_step(before, cache.totals, steps)
    return batch * steps / seconds, did


def _later_half(bench: EngineBench, batch: int, gen: int) -> float:
    forced = bench.forced(batch, gen)
    assert forced is not None
    plans = [bench.decode_plan(batch, position) for position in range(PROMPT + gen // 2, PROMPT + gen)]
    began = time.perf_counter()
    bench.run_all(choosing(forced, plans, gen // 2))
    return time.perf_counter() - began


def after_a_change(runner: Runner, trace: RoutingTrace, gen: int) -> list[float]:
    """Tokens a second of one stream, by 32 tokens."""
    bench = EngineBench(runner, 512, trace=trace)
    bench.prefill(1, PROMPT)
    forced = bench.forced(1, gen)
    assert forced is not None
    times = []

    def plans() -> Iterator[StepPlan]:
        for step in range(gen):
            times.append(time.perf_counter())
            yield bench.decode_plan(1, PROMPT + step)

    bench.run_all(choosing(forced, plans()))
    rates: list[float] = (32 / np.diff(np.array(times)[::32])).tolist()
    return rates


def per_step(before: ExpertCacheCounts, now: ExpertCacheCounts, steps: int) -> str:
    did = now.since(before)
    return (
        f"hits {did.hit_rate:.1%}, {did.promotions / steps:.1f} promotions and "
        f"{did.bytes / steps / 1e6:.0f} MB a step"
    )


def spread(speeds: list[float]) -> str:
    return f"{statistics.median(speeds):.1f} ({min(speeds):.1f} to {max(speeds):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 32], help="of a layer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--gen", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1, help="turns without the cache, and with it")
    args = parser.parse_args()
    shape = read_shape(open_dummy_model(args.model))
    sizes = {"layers": shape.num_layers, "experts": shape.num_experts, "top_k": shape.top_k}
    # Each stream reads a part of the trace of its own.
    tokens, seeds = max(BATCHES) * args.gen, itertools.count()

    def texts(name: str) -> list[RoutingTrace]:
        made = partial(generate, PRESETS[name], name, tokens=tokens, **sizes)
        return [made(seed=next(seeds)) for _ in range(args.rounds)]

    cases = [(batch, texts(name)) for name in PRESETS for batch in args.streams]
    changing = generate(PRESETS["local"], "local, changing", tokens=args.gen, topic_tokens=TOPIC, **sizes)
    for slots in args.slots:
        began = time.perf_counter()
        runner = load(args.model, slots, args.threads, args.gen)
        print(f"{runner.ready().device}\nloaded in {time.perf_counter() - began:.0f} s", flush=True)
        engine = runner.engine
        assert isinstance(engine, GpuEngine)
        cache = engine.expert_cache
        assert cache is not None
        engine.expert_cache = None
        statics = [[rate(runner, trace, batch, args.gen)[0] for trace in traces] for batch, traces in cases]
        engine.expert_cache = cache
        for (batch, traces), static in zip(cases, statics, strict=True):
            turns = [rate(runner, trace, batch, args.gen) for trace in traces]
            cached = [speed for speed, _ in turns]
            print(
                f"{slots} slots, {traces[0].source}, {batch} streams: static {spread(static)} tok/s, "
                f"cache {spread(cached)} ({statistics.median(cached) / statistics.median(static):.2f}x); "
                f"{turns[-1][1]}",
                flush=True,
            )
        rates = " ".join(f"{value:.0f}" for value in after_a_change(runner, changing, args.gen))
        print(f"{slots} slots, a topic every {TOPIC} tokens, tok/s by 32 tokens: {rates}", flush=True)
        del runner, engine, cache


if __name__ == "__main__":
    main()
