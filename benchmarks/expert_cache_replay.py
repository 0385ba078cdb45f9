"""Cache policies on routing traces: hit rates and bytes promoted, as a Markdown table.

python -m benchmarks.expert_cache_replay                       # the generated presets
python -m benchmarks.expert_cache_replay trace.bin --slots 64  # of `moeserve bench trace`
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from moeserve.placement.expert_cache.generate import PRESETS, generate
from moeserve.placement.expert_cache.policy import STEP_BYTES
from moeserve.placement.expert_cache.replay import (
    Replayed,
    Steps,
    first,
    hottest,
    replay_cache,
    replay_static,
)
from moeserve.placement.expert_cache.routing_trace import RoutingTrace, read_trace

EXPERT_MB = 2.9  # of Qwen3-30B-A3B in Q4_K_M, the mean of its layers
MOST = STEP_BYTES // int(EXPERT_MB * 1e6)  # promotions a step
LRU = 0.5  # with half of a score lost at each step the later use counts more than all before
DECAYS = (0.8, 0.9, 0.95, 0.99)


def policies(trace: RoutingTrace, steps: Steps, slots: int) -> Iterator[tuple[str, Replayed]]:
    start = first(trace, slots)
    everything = trace.ids.shape[1] * trace.experts
    yield "static, without heat", replay_static(steps, start)
    yield "static, hottest of this trace", replay_static(steps, hottest(trace, slots))
    yield "LRU, every miss", replay_cache(steps, start, decay=LRU, most=everything, adapts=False)
    yield f"LRU, {MOST} a step", replay_cache(steps, start, decay=LRU, most=MOST)
    for decay in DECAYS:
        yield f"decay {decay}, {MOST} a step", replay_cache(steps, start, decay=decay, most=MOST)
    yield f"decay 0.9, {MOST} a step, one late", replay_cache(steps, start, most=MOST, late=True)
    yield f"decay 0.9, {MOST} a step, shared", replay_cache(steps, start, most=MOST, shared=True)
    for most in (MOST // 2, 2 * MOST):
        yield f"decay 0.9, {most} a step", replay_cache(steps, start, most=most)


def after_a_change(trace: RoutingTrace, slots: int, topic_tokens: int) -> list[tuple[int, float]]:
    """Hit rates of the 16 tokens before so many after the changes of topic, all of them together."""
    rates: list[float] = []
    replay_cache(Steps(trace, 1), first(trace, slots), decay=0.9, most=MOST, per_step=rates)
    topics = np.array(rates[: len(rates) // topic_tokens * topic_tokens]).reshape(-1, topic_tokens)[1:]
    return [(end, float(topics[:, end - 16 : end].mean())) for end in (16, 32, 64, 128, topic_tokens)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--slots", type=int, nargs="+", default=[64, 32], help="of a layer")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--tokens", type=int, default=2048, help="of a generated trace")
    parser.add_argument("--layers", type=int, default=48, help="of a generated trace")
    args = parser.parse_args()
    shape = {"tokens": args.tokens, "layers": args.layers, "experts": 128, "top_k": 8}
    if args.trace is not None:
        traces = [read_trace(args.trace)]
    else:
        traces = [generate(distances, name, **shape) for name, distances in PRESETS.items()]
    print(
        "| trace | slots | streams | policy | hit rate | promotions a step | MB a step |\n|---|---|---|---|---|---|---|"
    )
    for trace in traces:
        for slots in args.slots:
            for streams in args.streams:
                for name, found in policies(trace, Steps(trace, streams), slots):
                    promoted = found.promotions_per_step
                    print(
                        f"| {trace.source} | {slots} | {streams} | {name} | {found.hit_rate:.1%} | {promoted:.1f} | "
                        f"{promoted * EXPERT_MB:.0f} |",
                        flush=True,
                    )
    if args.trace is None:
        changing = generate(PRESETS["local"], "local, changing", **shape, topic_tokens=256)
        for slots in args.slots:
            rates = ", ".join(f"{end}: {rate:.1%}" for end, rate in after_a_change(changing, slots, 256))
            print(
                f"\n{slots} slots, hit rate of the 16 tokens up to so many after a change of topic: {rates}"
            )


if __name__ == "__main__":
    main()
