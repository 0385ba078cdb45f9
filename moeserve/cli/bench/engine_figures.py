"""The figures that `moeserve bench engine` measures for one phase, as a line of its table or a saved result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from moeserve.cli.bench.results import Measured
from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.steps import ExpertUse

HEADER = (
    f"{'phase':<8}{'batch':>6}{'prompt':>8}{'gen':>6}{'tok/s':>10}{'MB/token':>10}{'GB/s':>8}{'of read':>9}"
)


@dataclass(frozen=True, slots=True)
class CacheFigure:
    """The expert cache's counts over some steps, as means per step."""

    hit_rate: float  # fraction of a step's experts that were found on the GPU
    promotions: float  # experts copied to the GPU

    @classmethod
    def between(
        cls, before: ExpertCacheCounts | None, now: ExpertCacheCounts | None, steps: int
    ) -> CacheFigure | None:
        """Returns the means over the steps between two counts; None if the experts' placement is fixed."""
        if before is None or now is None:
            return None
        did = now.since(before)
        return cls(did.hit_rate, did.promotions / steps)


class Timed(NamedTuple):
    """The measured time of some steps, and what they read."""

    seconds: float
    read: int  # bytes of weights
    cache: CacheFigure | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of output. Bytes count weights (each distinct expert once per step), not KV."""

    phase: str  # "prefill", "warm-up" or "decode"
    batch: int
    prompt: int  # prompt tokens of each sequence
    warm_up: int  # tokens of each sequence that were generated before
    gen: int  # decode steps; 0 for prefill
    tok_s: float  # summed over the batch
    bytes_per_token: float
    gb_s: float
    read_gb_s: float  # memory read bandwidth, measured just before and after
    cache: CacheFigure | None  # None: fixed placement

    @classmethod
    def of(
        cls,
        phase: str,
        batch: int,
        prompt: int,
        warm_up: int,
        gen: int,
        timed: Timed,
        read_gb_s: tuple[float, float],
    ) -> Figure:
        """Returns the figure of a phase. read_gb_s: bandwidth before and after it."""
        tokens = batch * (gen or prompt)
        return cls(
            phase=phase,
            batch=batch,
            prompt=prompt,
            warm_up=warm_up,
            gen=gen,
            tok_s=tokens / timed.seconds,
            bytes_per_token=timed.read / tokens,
            gb_s=timed.read / timed.seconds / 1e9,
            read_gb_s=sum(read_gb_s) / 2,
            cache=timed.cache,
        )

    @property
    def fraction(self) -> float:
        return self.gb_s / self.read_gb_s

    @property
    def row(self) -> str:
        """Returns the table's line, in HEADER's columns."""
        of_read = f"{'':>8}" if self.phase == "prefill" else f"{self.fraction:>8.0%}"
        found = "" if self.cache is None else f", {self.cache.hit_rate:.0%} of experts found on the GPU"
        return (
            f"{self.phase:<8}{self.batch:>6}{self.prompt:>8}{self.gen:>6}{self.tok_s:>10.1f}"
            f"{self.bytes_per_token / 1e6:>10.1f}{self.gb_s:>8.1f}{of_read}  ({self.read_gb_s:.1f} GB/s){found}"
        )

    @property
    def measured(self) -> Measured:
        parts = [f"{self.phase}, batch {self.batch}, prompt {self.prompt}"]
        parts += [f"warm-up {self.warm_up}"] if self.warm_up else []
        parts += [f"gen {self.gen}"] if self.gen else []
        return Measured(", ".join(parts), self.tok_s, "tok/s", higher_is_better=True)


def where_experts_are(use: ExpertUse) -> str:
    """Returns a text with the number of experts on the GPU in layers that have some there; "" if no layer has any."""
    on_gpu = np.frombuffer(use.on_gpu, np.uint8).reshape(use.layers, use.experts) > 0
    counts = {count for count in on_gpu.sum(axis=1).tolist() if 0 < count < use.experts}
    if not counts:
        return ""
    least, most = min(counts), max(counts)
    some = f"{least}" if least == most else f"{least} to {most}"
    return f", {some} of a layer's {use.experts} experts on the GPU"
