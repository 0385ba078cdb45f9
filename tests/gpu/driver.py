"""Drives a runner by hand, as the router would."""

from __future__ import annotations

import numpy as np

from moeserve.cli.bench.plans_in_turn import run_in_turn
from moeserve.cli.bench.window_slots import WindowSlots
from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.messages.sampling import SamplingParams, TokenLogprob
from moeserve.messages.slot_kinds import first_slots, kind_of
from moeserve.messages.steps import NewSeq, Row, StepPlan, StepResult
from moeserve.worker.runner import Runner

TOP = 20
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=TOP)
SCORED = SamplingParams(max_tokens=1 << 20, temperature=0.0, logprobs=TOP, prompt_logprobs=TOP)


def small_config(model: object, **options: object) -> ServerConfig:
    fixed: dict[str, object] = {
        "model": str(model),
        "max_num_seqs": 16,
        "max_model_len": 512,
        "max_total_tokens": 4096,
        "max_num_batched_tokens": 512,
    }
    return resolve(ServerConfig(**(fixed | options)))  # type: ignore[arg-type]


class Driver:
    """KV slots are handed out in a random order. One request slot a sequence, and the state slot of its number."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        ready = runner.ready()
        self._kinds = ready.kv_slot_kinds
        rng, counts = (
            np.random.default_rng(0),
            [*(kind.num_slots for kind in self._kinds), ready.num_kv_slots],
        )
        self._free = [
            (first + rng.permutation(count)).tolist()
            for first, count in zip(first_slots(self._kinds), counts, strict=True)
        ]
        self._has_states = ready.num_state_slots > 0
        self._held: dict[int, list[int]] = {}
        self._windows = WindowSlots(ready)
        self._steps = 0

    def new(self, slot: int, tokens: list[int], sampling: SamplingParams) -> NewSeq:
        self.free(slot)
        state_slot = slot if self._has_states else -1
        packed = np.array(tokens, np.int32).tobytes()
        return NewSeq(slot, packed, len(tokens), b"", sampling, state_slot=state_slot)

    def free(self, slot: int) -> None:
        for position, freed in enumerate(self._held.pop(slot, [])):
            self._free[kind_of(self._kinds, position)].append(freed)

    def adopt(self, slot: int, kv_slots: list[int]) -> None:
        """A request begins with another's KV."""
        self._held[slot] = kv_slots

    def take(self, position: int = 0) -> int:
        """A free KV slot."""
        return int(self._free[kind_of(self._kinds, position)].pop(0))

    def slots(self, slot: int) -> list[int]:
        """The KV slots of a request, by position."""
        return self._held[slot]

    def row(self, slot: int, count: int, *, sample: bool) -> Row:
        """The next `count` positions."""
        held = self._held.setdefault(slot, [])
        taken = [self.take(position) for position in range(len(held), len(held) + count)]
        held += taken
        start = len(held) - count
        in_window = self._windows.take(slot, start, count)
        return Row(slot, start, count, np.array(taken, np.int32).tobytes(), sample, in_window)

    def step(self, new: list[NewSeq], rows: list[Row]) -> StepResult:
        self._steps += 1
        zeroed = [[-1, seq.state_slot] for seq in new if self._has_states]
        return self.runner.step(StepPlan(self._steps, new, rows, np.array(zeroed, np.int32).tobytes()))

    def score(self, slot: int, tokens: list[int], chunk: int) -> list[TokenLogprob]:
        """What was predicted after each position: the prompt's logprobs, then the first sampled token's."""
        found: list[TokenLogprob] = []
        new = [self.new(slot, tokens, SCORED)]
        for start in range(0, len(tokens), chunk):
            count = min(chunk, len(tokens) - start)
            last = start + count == len(tokens)
            result = self.step(new, [self.row(slot, count, sample=last)])
            new = []
            found += result.prompt_logprobs.get(0, [])
            if last:
                assert result.sampled[0].logprob is not None
                found.append(result.sampled[0].logprob)
        return found

    def generate(
        self, slot: int, tokens: list[int], count: int, sampling: SamplingParams = GREEDY
    ) -> list[int]:
        result = self.step([self.new(slot, tokens, sampling)], [self.row(slot, len(tokens), sample=True)])
        out = [result.sampled[0].token_id]
        while len(out) < count:
            result = self.step([], [self.row(slot, 1, sample=True)])
            out.append(result.sampled[0].token_id)
        return out

    def generate_ahead(
        self, slot: int, tokens: list[int], count: int, sampling: SamplingParams
    ) -> list[TokenLogprob]:
        """Each step launched while the one before is computed. sampling: with logprobs."""
        plans = [
            StepPlan(step, [], [self.row(slot, 1, sample=True)])
            if step
            else self._first(slot, tokens, sampling)
            for step in range(count)
        ]
        out = []
        for answered in run_in_turn(self.runner, plans):
            entry = answered.result.sampled[0].logprob
            assert entry is not None
            out.append(entry)
        return out

    def _first(self, slot: int, tokens: list[int], sampling: SamplingParams) -> StepPlan:
        new = [self.new(slot, tokens, sampling)]
        return StepPlan(0, new, [self.row(slot, len(tokens), sample=True)])
