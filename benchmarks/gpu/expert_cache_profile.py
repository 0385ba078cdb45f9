"""Where a decode step's time goes with the expert cache: on the GPU's clock by layer and misses, and on the host's.

    python -m benchmarks.gpu.expert_cache_profile model.gguf [--slots 64]    # a header of benchmarks.header suffices
    python -m benchmarks.gpu.expert_cache_profile --pool 8,15,16             # no model: the pool and the hand-off alone

First the rates of steps as they are served, then the same with a kernel that reads the GPU's clock before and behind
each publish, and a poll that does so when it begins and ends. Each layer's time by how many experts the pool computed:

    publish     of that kernel and two launches
    hand-off    from its end to the answer
    own         of that, what the GPU computes meanwhile
    wait        the rest
    other       from the answer to the next layer's publish: attention, norms, router
"""

# mypy: ignore-errors
# (Triton kernels, and what is put in place of methods.)

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait, globaltimer

from benchmarks.gpu.expert_cache import BATCHES, PROMPT, load, per_step
from benchmarks.gpu.handoff import EXPERTS, REPEATS, STEPS, TOP_K, Bench, Step, typical
from benchmarks.moe_layer import HIDDEN, WIDTH
from moeserve.cli.bench.engine import EngineBench
from moeserve.kernels.handoff import ExpertHandoff
from moeserve.kernels.handoff import expert_handoff as launches
from moeserve.kernels.handoff.triton import poll
from moeserve.kernels.launch import kernel, pdl
from moeserve.models.open import open_dummy_model
from moeserve.models.registry import read_shape
from moeserve.placement.expert_cache.generate import PRESETS, generate
from moeserve.placement.expert_cache.routing_trace import RoutingTrace
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps.step_completion import StepCompletion
from moeserve.worker.runner import Runner

ROUTED, PUBLISHED, POLLS, ANSWERED = range(4)
Times = npt.NDArray[np.int64]


@kernel
def stamp_kernel(out):
    """out: int64 [1] = the GPU's clock, ns."""
    tl.store(out, globaltimer())


@kernel
def stamped_poll_kernel(answer, waits, out, PDL: tl.constexpr):
    """poll_kernel, with out int64 [2]: when it began and ended."""
    if PDL:
        gdc_wait()
    tl.store(out, globaltimer())
    poll(answer, waits)
    tl.store(out + 1, globaltimer())


class Stamps:
    """Of each layer of the last step, ns on the GPU's clock: routed, published, polls, answered."""

    def __init__(self, layers: int) -> None:
        self.on_device = torch.zeros(layers, 4, dtype=torch.int64, device="cuda")
        waits = torch.zeros(4, dtype=torch.int32, device="cuda")
        # Of either alignment, which makes another kernel.
        stamp_kernel((1,), self.on_device[0, ROUTED:], num_warps=1)
        stamp_kernel((1,), self.on_device[0, PUBLISHED:], num_warps=1)
        stamped_poll_kernel(
            (1,), waits, waits, self.on_device[0, POLLS:], pdl(), num_warps=1, launch_pdl=pdl()
        )

    @contextmanager
    def within(self) -> Iterator[None]:
        """What is launched here has stamps."""
        publish, collect, polling = ExpertHandoff.publish, ExpertHandoff.collect, launches.poll_kernel
        stamps, at = self.on_device, [0]

        def stamped_publish(handoff: ExpertHandoff, layer: int, *arguments: Any, **options: Any) -> None:
            stamp_kernel((1,), stamps[layer, ROUTED:], num_warps=1)
            publish(handoff, layer, *arguments, **options)
            stamp_kernel((1,), stamps[layer, PUBLISHED:], num_warps=1)

        def stamped_collect(handoff: ExpertHandoff, layer: int, *arguments: Any, **options: Any) -> None:
            at[0] = layer
            collect(handoff, layer, *arguments, **options)

        def stamped_poll(grid: tuple[int, ...], answer: Tensor, waits: Tensor, *_: Any, **__: Any) -> None:
            stamped_poll_kernel(
                grid, answer, waits, stamps[at[0], POLLS:], pdl(), num_warps=1, launch_pdl=pdl()
            )

        patched: Any = ExpertHandoff
        module: Any = launches
        patched.publish, patched.collect, module.poll_kernel = stamped_publish, stamped_collect, stamped_poll
        try:
            yield
        finally:
            patched.publish, patched.collect, module.poll_kernel = publish, collect, polling


class HostTimes:
    """Seconds in methods of objects, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._undo: list[tuple[Any, str]] = []

    def of(self, name: str, owner: Any, method: str) -> None:
        call = getattr(owner, method)

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments, **options)
            self.seconds[name].append(time.perf_counter() - began)
            return result

        setattr(owner, method, timed)
        self._undo.append((owner, method))

    def stop(self) -> None:
        for owner, method in reversed(self._undo):
            delattr(owner, method)

    def print(self, steps: int) -> None:
        for name, seconds in self.seconds.items():
            mean, middle = sum(seconds) / steps * 1e6, float(np.median(seconds)) * 1e6
            print(f"    {name:<34}{mean:>8.0f} us a step, median of a call {middle:>7.0f}", flush=True)


class Profile:
    def __init__(self, runner: Runner, trace: RoutingTrace, gen: int) -> None:
        self.runner, self.trace, self.gen = runner, trace, gen
        engine: Any = runner.engine
        assert isinstance(engine, GpuEngine)
        self.engine: Any = engine
        self.handoff: Any = self.engine._model._ffn._handoff
        self.layers = len(self.engine._model._ffn._layers)

    def reads(self) -> npt.NDArray[np.int64]:
        """[layers]: experts that the pool has read since the start."""
        return np.array(
            [int(self.handoff.expert_token_counts(layer)[1].sum()) for layer in range(self.layers)]
        )

    def steps(self, batch: int, each: Callable[[], None] = lambda: None) -> Iterator[float]:
        """Seconds of each step of the second half."""
        bench = EngineBench(self.runner, 512, trace=self.trace)
        bench.prefill(batch, PROMPT)
        forced = bench.forced(batch, self.gen)
        assert forced is not None
        for step in range(self.gen):
            plan = bench.decode_plan(batch, PROMPT + step)
            began = time.perf_counter()
            forced.choose(step)
            bench.run(plan)
            seconds = time.perf_counter() - began
            each()
            if step >= self.gen // 2:
                yield seconds

    def rate(self, name: str, batch: int) -> None:
        cache, before, seconds = self.engine.expert_cache, None, []
        for of_step in self.steps(batch):
            seconds.append(of_step)
            if before is None and cache is not None:
                before = cache.totals  # of the second half alone, as the rate
        line = "" if before is None else per_step(before, cache.totals, len(seconds))
        quarter = [f"{value * 1e3:.2f}" for value in np.percentile(seconds, (10, 50, 90))]
        print(f"  {name}, {batch} streams: {batch * len(seconds) / sum(seconds):.1f} tok/s; step ms at 10, 50, 90%: "
              f"{' '.join(quarter)}; {line}", flush=True)  # fmt: skip

    def sleeping(self, name: str, batch: int) -> None:
        """The rate with a host thread that sleeps until the step's end."""
        usual = self.engine._done
        self.engine._done = StepCompletion(self.engine._model.device, self.engine.logit_rows, yields=True)
        self.rate(f"{name}, the host sleeps", batch)
        self.engine._done = usual

    def on_host(self, batch: int) -> None:
        times, e, cache = HostTimes(), self.engine, self.engine.expert_cache
        times.of("runner.step", self.runner, "step")
        times.of(" engine.forward", e, "forward")
        if cache is not None:
            times.of("  cache.before_step", cache, "before_step")
            times.of("   cache._observe", cache, "_observe")
            times.of("   cache._start", cache, "_start")
            times.of("   maps.publish", cache._maps, "publish")
        times.of("  model.begin", e._model, "begin")
        if cache is not None:
            times.of("  cache.after_launch", cache, "after_launch")
            times.of("   slots.fill", cache._slots, "fill")
            times.of("    tables.write", cache._slots._tables, "write")
        times.of(" engine.logits", e, "logits")
        times.of(" engine.sample", e, "sample")
        times.of("  done.wait", e._done, "wait")
        seconds = list(self.steps(batch, partial(times.seconds["(end)"].append, 0.0)))
        times.stop()
        times.seconds.pop("(end)")
        print(f"  host, {batch} streams, {1e3 * sum(seconds) / len(seconds):.2f} ms a step:")
        times.print(self.gen)

    def by_layer(self, stamps: Stamps, batch: int) -> None:
        """With the graphs captured within `stamps`."""
        taken: list[Times] = []
        reads = [self.reads()]

        def take() -> None:
            taken.append(stamps.on_device.cpu().numpy().copy())
            reads.append(self.reads())

        seconds = list(self.steps(batch, take))
        # The prompt's steps have stamps too, which `take` does not see; `reads` begins before them.
        times, misses = np.array(taken), np.diff(np.array(reads), axis=0)
        times, misses = times[self.gen // 2 :], misses[self.gen // 2 :]
        step_us = (times[:, -1, ANSWERED] - times[:, 0, ROUTED]) / 1e3
        host_us = np.array(seconds) * 1e6
        print(f"  stamped, {batch} streams: step {host_us.mean():.0f} us by the host; first router to last answer "
              f"{step_us.mean():.0f}; {misses.sum() / len(misses):.1f} misses a step", flush=True)  # fmt: skip
        publish = (times[:, :, PUBLISHED] - times[:, :, ROUTED]) / 1e3
        own = (times[:, :, POLLS] - times[:, :, PUBLISHED]) / 1e3
        wait = (times[:, :, ANSWERED] - times[:, :, POLLS]) / 1e3
        other = (times[:, 1:, ROUTED] - times[:, :-1, ANSWERED]) / 1e3
        print(
            "    misses  layers a step   hand-off us: mean   10%   50%   90%     own    wait publish   other after it"
        )
        for count in range(int(misses.max()) + 1):
            chosen = misses == count
            if not chosen.any():
                continue
            whole = (own + wait)[chosen]
            low, middle, high = np.percentile(whole, (10, 50, 90))
            after = other[chosen[:, :-1]]
            print(f"    {count:>6}{chosen.sum() / len(misses):>15.1f}{whole.mean():>20.1f}{low:>6.1f}{middle:>6.1f}"
                  f"{high:>6.1f}{own[chosen].mean():>8.1f}{wait[chosen].mean():>8.1f}"
                  f"{publish[chosen].mean():>8.1f}{after.mean() if len(after) else 0.0:>9.1f}", flush=True)  # fmt: skip
        print(f"    sums a step, us: publish {publish.sum(1).mean():.0f}, own {own.sum(1).mean():.0f}, "
              f"wait {wait.sum(1).mean():.0f}, other {other.sum(1).mean():.0f}", flush=True)  # fmt: skip


def of_model(args: argparse.Namespace) -> None:
    shape = read_shape(open_dummy_model(args.model))
    sizes = {"layers": shape.num_layers, "experts": shape.num_experts, "top_k": shape.top_k}
    trace = generate(PRESETS["local"], "local", tokens=max(BATCHES) * args.gen, **sizes)
    began = time.perf_counter()
    runner = load(args.model, args.slots, args.threads, args.gen)
    print(f"{runner.ready().device}\nloaded in {time.perf_counter() - began:.0f} s", flush=True)
    profile = Profile(runner, trace, args.gen)
    cache = profile.engine.expert_cache
    most = cache._slots.most
    for name, its, limit in [("fixed", None, 0), ("cache", cache, most)] + [
        (f"cache, {limit} promotions at most", cache, limit) for limit in args.limits
    ]:
        profile.engine.expert_cache = its
        cache._slots.most = limit
        for batch in args.streams:
            profile.rate(name, batch)
            if limit in (0, most):
                if batch == 1 and args.sleeping:
                    profile.sleeping(name, batch)
                profile.on_host(batch)
    cache._slots.most = most
    if args.rates:
        return
    stamps = Stamps(profile.layers)
    profile.engine.expert_cache = None
    with stamps.within():
        profile.engine.warm_up.capture()
    for name, its in (("fixed", None), ("cache", cache)):
        profile.engine.expert_cache = its
        print(name)
        for batch in args.streams:
            profile.by_layer(stamps, batch)


def pool_alone(threads: int, layers: int) -> None:
    """A layer's experts by the pool, queued by Python and handed over by the GPU, which does nothing else."""
    for width in (256, WIDTH):
        bench = Bench(threads, 4, 1, width, same=False)
        bench.layers = [bench.layers[i % 4] for i in range(layers)]
        x, weights = torch.randn(1, HIDDEN), torch.full((1, TOP_K), 1 / TOP_K)
        handoff = bench.handoff()
        step = Step(handoff, handoff, layers, 1)
        mean = sum(m.bytes / EXPERTS for e in bench.layers for m in e.matrices) / layers
        for chosen in (0, 1, 2, 3, 4, 8):
            routings = []
            for seed in range(REPEATS):
                scores = torch.rand(STEPS, layers, 1, EXPERTS, generator=torch.Generator().manual_seed(seed))
                ids = scores.topk(TOP_K).indices.int()
                ids[..., chosen:] = -1
                routings.append(ids)
            handed = typical(step.seconds, [ids.cuda() for ids in routings]) * 1e6
            alone = typical(partial(bench.alone, x, weights), routings) * 1e6 if chosen else 0.0
            print(f"  {threads} threads, width {width}, {chosen} experts of {mean / 1e6:.2f} MB: "
                  f"pool alone {alone:.1f} us, handed over {handed:.1f} us a layer", flush=True)  # fmt: skip
        print(f"  read {bench.read_gb_s():.0f} GB/s", flush=True)
        handoff.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--slots", type=int, default=64, help="of a layer")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--gen", type=int, default=256)
    parser.add_argument("--rates", action="store_true", help="no stamps")
    parser.add_argument(
        "--sleeping", action="store_true", help="also with a host that sleeps until a step's end"
    )
    parser.add_argument("--limits", type=int, nargs="*", default=[0], help="promotions of a step at most")
    parser.add_argument("--pool", default="", help="thread counts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for threads in filter(None, args.pool.split(",")):
        pool_alone(int(threads), 48)
    if args.model is not None:
        of_model(args)


if __name__ == "__main__":
    main()
