"""Decoding with all experts in RAM, by how many of a token's least experts are added one layer late.

    python -m benchmarks.gpu.deferral [--deferred 0,2,4] [--batch 1,8]

Qwen3-30B-A3B's shape with random weights, each number in turn, four rounds; the median.
"""

from __future__ import annotations

import argparse
import statistics
import time

from benchmarks.gpu.crossover import engine_of, load
from moeserve.cli.bench.engine import EngineBench
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps.graph_steps import GraphSteps
from moeserve.worker.runner import Runner

PROMPT, WARM_UP, STEPS, ROUNDS = 32, 4, 32, 4


def _handoff_of(engine: GpuEngine) -> ExpertHandoff:
    handoff = engine._model._ffn._handoff
    assert handoff is not None
    return handoff


def report(runner: Runner, deferred: list[int], batches: list[int]) -> None:
    bench, engine = EngineBench(runner, PROMPT), engine_of(runner)
    handoff = _handoff_of(engine)
    graphs = {}
    for n in deferred:
        handoff.defer(n)
        graphs[n] = GraphSteps(engine._model, engine._inputs, engine.facts)
        graphs[n].capture_all(lambda done, total: None)
    rates: dict[tuple[int, int], list[float]] = {(n, batch): [] for n in deferred for batch in batches}
    for _ in range(ROUNDS):
        for n in deferred:
            handoff.defer(n)
            engine._graphs = engine._launcher._graphs = graphs[n]
            for batch in batches:
                bench.prefill(batch, PROMPT)
                bench.decode(batch, PROMPT, WARM_UP)
                start = time.perf_counter()
                bench.decode(batch, PROMPT + WARM_UP, STEPS)
                rates[n, batch].append(batch * STEPS / (time.perf_counter() - start))
    for (n, batch), found in rates.items():
        low, mid, high = min(found), statistics.median(found), max(found)
        print(f"{n} deferred, batch {batch}: {mid:.1f} tok/s ({low:.1f} to {high:.1f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--deferred", default="0,2,4")
    parser.add_argument("--batch", default="1,8")
    args = parser.parse_args()
    deferred, batches = ([int(n) for n in text.split(",")] for text in (args.deferred, args.batch))
    runner = load(0, 1024, max_num_seqs=max(batches), max_deferred_experts_per_token=max(deferred))
    print(runner.ready().device, flush=True)
    report(runner, deferred, batches)


if __name__ == "__main__":
    main()
