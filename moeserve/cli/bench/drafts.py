"""Decode with drafts in `moeserve bench engine`. A given share of the drafts is accepted whatever is sampled, because
drafts of dummy weights are never right.

Each step takes the tokens that the step before it sampled, so a plan is made after the result, as in a server. Every
step has as many drafts as --speculative-config allows, whether they save time or not; a server's router makes fewer.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from moeserve.cli.bench.engine_figures import Figure, Timed
from moeserve.cli.workload.options import real
from moeserve.errors import ConfigError
from moeserve.kv.driven_slots import slots_in_turn
from moeserve.messages.steps import CONTINUES, Row, StepPlan, StepResult

if TYPE_CHECKING:
    from moeserve.worker.runner import Runner

WARM_STEPS = 4


class Driven(Protocol):
    """The bench that drives the worker's runner, as `DraftedDecode` uses it."""

    steps: int  # of the next plan

    def prefill(self, batch: int, prompt: int) -> float: ...

    def read_gb_s(self) -> float: ...

    def run(self, plan: StepPlan) -> StepResult: ...


class DraftedDecode:
    """Decodes with drafts after prompts that were computed before."""

    def __init__(self, bench: Driven, runner: Runner, drafts: int) -> None:
        """drafts: number for each sequence and step. Raises ConfigError for a model whose windows have a KV pool of
        their own."""
        if runner.ready().num_window_slots:
            raise ConfigError(
                "--acceptance: does not work yet with a separate KV pool for sliding-window layers; leave it out, or "
                "say --kv-window-ratio 0"
            )
        self._bench, self._runner, self._drafts = bench, runner, drafts

    def figures(self, batches: list[int], prompt: int, gen: int, shares: list[float]) -> Iterator[Figure]:
        """Yields a figure for each batch and each share of accepted drafts."""
        for batch in batches:
            for right in shares:
                self._bench.prefill(batch, prompt)
                before = self._bench.read_gb_s()
                seconds, tokens = self.run(batch, prompt, gen, right)
                timed = Timed(seconds * batch * gen / tokens, 0)
                rates = before, self._bench.read_gb_s()
                yield Figure.of(f"at {right:.0%}", batch, prompt, 0, gen, timed, rates)

    def run(self, batch: int, first: int, gen: int, right: float) -> tuple[float, int]:
        """Decodes until the sequences have on average got `gen` tokens, or one of them has no room for more. first:
        known tokens of each sequence. right: share of accepted drafts. Returns the seconds, and the tokens of all
        sequences together."""
        self._runner.force_acceptance(right)
        room = room_of(gen, self._drafts)
        kinds = self._runner.ready().kv_slot_kinds
        granted = [slots_in_turn(kinds, batch, seq, first, room) for seq in range(batch)]
        lengths = [first + 1] * batch
        for step in range(WARM_STEPS):
            self._step(lengths, granted if step == 0 else [b""] * batch, first + room)
        began, before = time.perf_counter(), sum(lengths)
        while sum(lengths) - before < batch * gen and max(lengths) < first + room:
            self._step(lengths, [b""] * batch, first + room)
        return time.perf_counter() - began, sum(lengths) - before

    def _step(self, lengths: list[int], granted: list[bytes], end: int) -> None:
        rows = []
        for seq, slots in enumerate(granted):
            count = min(1 + self._drafts, max(end - lengths[seq], 1))  # the last token needs no slot
            rows.append(Row(seq, CONTINUES, count, slots, True))
        result = self._bench.run(StepPlan(self._bench.steps, [], rows))
        for seq, sampled in enumerate(result.sampled):
            lengths[seq] += 1 + (0 if sampled.accepted is None else len(sampled.accepted.token_ids))


def room_of(gen: int, drafts: int) -> int:
    """Returns the number of positions of a sequence that gets `gen` tokens or, if many of its drafts are accepted, up
    to twice as many."""
    return 2 * gen + (WARM_STEPS + 2) * (1 + drafts)


_share = real(0.0, 1.0)


def _shares(text: str) -> list[float]:
    return [_share(part) for part in text.split(",")]


_shares.__name__ = "list of shares"  # argparse uses the name in its error message


def add_acceptance(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--acceptance",
        type=_shares,
        default=[],
        metavar="P,P",
        help=(
            "also measure decoding with the drafts of --speculative-config, and accept these shares of the drafts, "
            "such as 0.88,0.5, regardless of the sampled tokens (drafts of dummy weights are never right)"
        ),
    )
