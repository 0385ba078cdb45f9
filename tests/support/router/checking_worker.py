"""The worker of a world for the router core: it checks what it is told."""

from __future__ import annotations

import math
import random
from array import array
from dataclasses import dataclass, field
from itertools import accumulate

from moeserve.kv.slot_kinds import num_slot_numbers
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import CONTINUES, Accepted, Fork, NewSeq, Row, Sampled, StepPlan, StepResult
from moeserve.router.core.limits import Limits
from tests.support.router.virtual_tiers import UNREADABLE, VirtualTiers

STOP_TOKEN = 999
NOTHING = 0  # the prefix without tokens
NEVER = -1
WRONG_DRAFT = 555


def ints(packed: bytes) -> list[int]:
    return array("i", packed).tolist()


@dataclass
class Bound:
    """A request slot as the worker keeps it."""

    new_seq: NewSeq
    tokens: list[int]  # by position; those it sampled included
    prefixes: list[int]  # by position: stands for the tokens up to there
    table: array[int]  # int32: KV slots by position
    windows: array[int]  # int32: slots of the windowed layers' pool by position; -1: not known here
    # Slots that are granted for positions behind those of the tables, and in the windowed layers' pool.
    spare: array[int] = field(default_factory=lambda: array("i"))
    spare_windows: array[int] = field(default_factory=lambda: array("i"))
    checked: int = NEVER  # how much had been written at the last look at the table's slots
    position_of: dict[int, int] = field(default_factory=dict)  # of each of them

    @property
    def id(self) -> int:
        return self.new_seq.sampling.seed

    def push(self, token: int) -> None:
        self.tokens.append(token)
        self.prefixes.append(extended(self.prefixes[-1] if self.prefixes else NOTHING, token))


def extended(prefix: int, token: int) -> int:
    return hash((prefix, token))


BEAM_VOCABULARY = 12


def top_tokens(tokens: list[int], count: int) -> TokenLogprob:
    """What the worker below says of the next token of a beam: a distribution by all tokens before it, in which
    STOP_TOKEN is as likely as others."""
    draw = random.Random(hash(tuple(tokens)))
    weights = [draw.random() ** 3 + 1e-3 for _ in range(BEAM_VOCABULARY)]
    names = [STOP_TOKEN, *range(1, BEAM_VOCABULARY)]
    ranked = sorted(zip(names, weights, strict=True), key=lambda pair: -pair[1])[:count]
    logprobs = [math.log(weight / sum(weights)) for _, weight in ranked]
    ids = [name for name, _ in ranked]
    return TokenLogprob(ids[0], logprobs[0], 1, tuple(ids), tuple(logprobs))


class CheckingWorker:
    """Executes plans in order. Each slot remembers the tokens whose KV it holds, all of them from the first;
    every row asserts that what it reads is there, whoever wrote it. So does each slot of recurrent state: a row asserts
    that its state is that of exactly the tokens before it. Where windowed layers have a pool of their own, its slots
    remember as much, and a row asserts it of its window. The n-th token of request r is `script[r][n]`, or 100 + n
    where there is no script."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.script: dict[int, list[int]] = {}
        self.bound: dict[int, Bound] = {}
        # Lists: numpy takes longer for tables as short as a random life's.
        num_slots = num_slot_numbers(limits.slot_kinds, limits.num_kv_slots)
        self.kv = [UNREADABLE] * num_slots  # slot -> the prefix that it ends
        self.window_kv = [UNREADABLE] * limits.num_window_slots
        self.written: list[int] = []  # every slot that a row has written, in that order
        self.states: dict[int, int] = {}  # state slot -> the prefix that it has consumed
        self.tiers = VirtualTiers(
            limits.page_tokens, ram_pages=1000 * ("ram" in limits.tiers), has_disk="disk" in limits.tiers
        )
        self.copies = 0  # between state slots
        self.last_step = 0
        self.computed = 0  # positions
        self.right_drafts = 0.7  # share of the drafts that are right

    def token(self, id: int, index: int) -> int:
        script = self.script.get(id, [])
        return script[index] if index < len(script) else 100 + index

    def step(self, plan: StepPlan) -> StepResult:
        assert plan.step == self.last_step + 1
        self.last_step = plan.step
        self._check_limits(plan)
        if plan.pages is not None:
            self.tiers.write(plan.pages, self.kv, self.states)
        self._copy_states(ints(plan.state_copies))
        if plan.pages is not None:
            self.tiers.load(plan.pages, self.kv, self.states)
        for new in plan.new_seqs:
            self._bind(new)
        for fork in plan.forks:
            self._fork(fork)
        drafts = {row.req_slot: self._draft(row) for row in plan.rows if row.start == CONTINUES}
        for row in plan.rows:  # all are written before any is read
            if row.start == CONTINUES:
                self._write_drafts(row, drafts[row.req_slot])
            else:
                self._write(row)
        sampled: list[Sampled] = []
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        for index, row in enumerate(plan.rows):
            bound = self.bound[row.req_slot]
            if row.start == CONTINUES:
                sampled.append(self._sample_drafts(bound, drafts[row.req_slot]))
                continue
            self._check_held(bound)
            end = row.start + row.count
            self._check_window(bound, row.start, end)
            self._advance_state(bound, row.start, end)
            prompt = bound.new_seq.num_prompt
            if row.sample:
                if (wanted := bound.new_seq.sampling.logprobs) is not None:  # it is a beam's
                    top = top_tokens(bound.tokens[:end], wanted)
                    sampled.append(Sampled(top.token_id, top))
                else:
                    sampled.append(Sampled(self.token(bound.id, end - prompt)))
                bound.push(sampled[-1].token_id)
            if bound.new_seq.sampling.prompt_logprobs is not None and row.start < prompt:
                tokens = bound.tokens[row.start + 1 : min(end + 1, prompt)]
                prompt_logprobs[index] = [TokenLogprob(t, -1.0, 1, (), ()) for t in tokens]
        pages = None
        if self.limits.page_tokens:
            pages = self.tiers.report(self.kv, self.states, may_wait=not plan.rows)
        return StepResult(plan.step, sampled, prompt_logprobs, compute_ms=0.0, idle_ms=0.0, pages=pages)

    def _check_window(self, bound: Bound, start: int, end: int) -> None:
        if not self.limits.num_window_slots:
            return
        first = max(0, start - self.limits.window + 1)
        slots = bound.windows[first:end]
        assert min(slots) >= 0, "a slot of the window is not known"
        held = [self.window_kv[slot] for slot in slots]
        assert held == bound.prefixes[first:end], "a window slot does not hold what is read"

    def _draft(self, row: Row) -> list[int]:
        """Tokens for a row that may have drafts, right ones and wrong ones."""
        bound = self.bound[row.req_slot]
        assert 1 <= row.count <= 1 + self.limits.max_drafts
        index = len(bound.tokens) - bound.new_seq.num_prompt
        if bound.tokens[-1] == STOP_TOKEN and index > bound.new_seq.sampling.min_tokens:
            return []
        draw = random.Random(hash((bound.id, index, self.last_step)))
        right = [self.token(bound.id, index + ahead) for ahead in range(draw.randint(0, row.count - 1))]
        return [token if draw.random() < self.right_drafts else WRONG_DRAFT for token in right]

    def _write_drafts(self, row: Row, drafts: list[int]) -> None:
        """Takes the slots that are granted, and writes the KV of the last token and the drafts."""
        bound = self.bound[row.req_slot]
        assert row.sample
        bound.spare.extend(ints(row.kv_slots))
        windows = ints(row.window_slots)
        has_windows = self.limits.num_window_slots > 0
        assert len(windows) == (len(row.kv_slots) // 4 if has_windows else 0)
        bound.spare_windows.extend(windows)
        assert len(bound.table) == len(bound.tokens) - 1, "a row begins at the last token"
        assert len(drafts) < len(bound.spare), "there are slots for all positions of a row"
        prefix = bound.prefixes[-1]
        self.written += bound.spare[: 1 + len(drafts)]
        for place, token in enumerate([None, *drafts]):
            prefix = prefix if token is None else extended(prefix, token)
            self.kv[bound.spare[place]] = prefix
            if has_windows:
                self.window_kv[bound.spare_windows[place]] = prefix
        self.computed += 1 + len(drafts)

    def _sample_drafts(self, bound: Bound, drafts: list[int]) -> Sampled:
        """Keeps the drafts that are right, and one token. The others' slots are spare again."""
        start, prompt = len(bound.tokens) - 1, bound.new_seq.num_prompt
        run: list[int] = []
        for draft in [*drafts, None]:
            token = self.token(bound.id, start + 1 + len(run) - prompt)
            if token < 0 and run:
                break  # it fails in the next step
            run.append(token)
            may_stop = start + len(run) - prompt >= bound.new_seq.sampling.min_tokens
            if token != draft or (token == STOP_TOKEN and may_stop):
                break
        for place, token in enumerate(run):
            slot = bound.spare.pop(0)
            assert self.kv[slot] == bound.prefixes[len(bound.table)], (
                "a slot does not hold what is read from it"
            )
            if bound.checked != NEVER:
                bound.position_of[slot] = len(bound.table)
            bound.table.append(slot)
            if self.limits.num_window_slots:
                bound.windows.append(bound.spare_windows.pop(0))
            bound.push(token)
            if place == 0:
                self._advance_state(bound, start, start + 1)
        self._check_held(bound)
        self._check_window(bound, start, start + len(run))
        if len(run) > 1:
            self._advance_state(bound, start + 1, start + len(run))
        return Sampled(run[0], accepted=Accepted(len(drafts), run[1:]) if drafts else None)

    def _bind(self, new: NewSeq) -> None:
        table, windows = array("i", new.prefix_slots), array("i", new.prefix_window_slots)
        if self.limits.num_window_slots:
            assert len(windows) == min(len(table), self.limits.window - 1)
        windows = array("i", [-1] * (len(table) - len(windows))) + windows
        tokens = ints(new.token_ids)
        bound = Bound(new, tokens, [*accumulate(tokens, extended, initial=NOTHING)][1:], table, windows)
        is_beam = new.num_prompt == 0  # without tokens until a fork
        assert is_beam or len(bound.table) < len(bound.tokens), "the last known token is always computed"
        self.bound[new.req_slot] = bound

    def _fork(self, fork: Fork) -> None:
        """The source has one token more, which it has sampled by itself."""
        source, target = self.bound[fork.source], self.bound[fork.target]
        assert source.id == target.id
        assert len(source.table) >= fork.position
        if target is not source:
            target.tokens = source.tokens[: fork.position]
            target.prefixes = source.prefixes[: fork.position]
            target.table = source.table[: fork.position]
            target.windows = source.windows[: fork.position]
        assert len(target.table) == fork.position
        del target.tokens[fork.position :], target.prefixes[fork.position :]
        target.checked = NEVER
        target.push(fork.token_id)

    def _write(self, row: Row) -> None:
        bound = self.bound[row.req_slot]
        slots = ints(row.kv_slots)
        known = len(bound.tokens)
        assert row.count == len(slots) > 0
        assert row.start == len(bound.table), "positions are written in order, each once"
        assert row.start + row.count <= known, "a token is computed that nobody has sampled"
        assert row.sample == (row.start + row.count == known and bound.new_seq.sampling.max_tokens > 0)
        for slot, prefix in zip(slots, bound.prefixes[row.start : row.start + row.count], strict=True):
            self.kv[slot] = prefix
        self.written += slots
        if bound.checked != NEVER:
            assert not any(slot in bound.position_of for slot in slots), "a slot is written for two positions"
            bound.position_of.update(zip(slots, range(row.start, known), strict=False))
        bound.table.extend(slots)
        windows = ints(row.window_slots)
        assert len(windows) == (row.count if self.limits.num_window_slots else 0)
        for slot, prefix in zip(windows, bound.prefixes[row.start : row.start + len(windows)], strict=True):
            self.window_kv[slot] = prefix
        bound.windows.extend(windows)
        self.computed += row.count

    def _check_held(self, bound: Bound) -> None:
        """That all slots of its table hold what is read from it: after a first look at all, those written since. Where
        pages come and go, which no row writes, each look is at all."""
        if bound.checked == NEVER:
            held = [self.kv[slot] for slot in bound.table]
            assert held == bound.prefixes[: len(held)], "a slot does not hold what is read from it"
            if self.limits.page_tokens:
                return
            bound.position_of = {slot: position for position, slot in enumerate(bound.table)}
        for slot in self.written[bound.checked :]:
            position = bound.position_of.get(slot)
            assert position is None or self.kv[slot] == bound.prefixes[position], "a slot was written over"
        bound.checked = len(self.written)

    def _copy_states(self, copies: list[int]) -> None:
        for source, destination in zip(copies[::2], copies[1::2], strict=True):
            assert 0 <= destination < self.limits.num_state_slots
            self.states[destination] = NOTHING if source == -1 else self.states[source]
            self.copies += source != -1

    def _advance_state(self, bound: Bound, start: int, end: int) -> None:
        slot = bound.new_seq.state_slot
        assert (slot == -1) == (self.limits.num_state_slots == 0)
        if slot != -1:
            before = bound.prefixes[start - 1] if start else NOTHING
            assert self.states[slot] == before, "a state is not that of the tokens before the row"
            self.states[slot] = bound.prefixes[end - 1]

    def _check_limits(self, plan: StepPlan) -> None:
        assert plan.rows or self.limits.page_tokens
        assert sum(row.count for row in plan.rows) <= self.limits.max_num_batched_tokens
        req_slots = [row.req_slot for row in plan.rows]
        assert len(req_slots) <= self.limits.max_num_seqs
        _check_distinct(req_slots, self.limits.max_num_seqs)
        count = num_slot_numbers(self.limits.slot_kinds, self.limits.num_kv_slots)
        _check_distinct(ints(b"".join(row.kv_slots for row in plan.rows)), count)
        _check_distinct(ints(b"".join(row.window_slots for row in plan.rows)), self.limits.num_window_slots)


def _check_distinct(slots: list[int], count: int) -> None:
    """Asserts that the slots are distinct and among the `count` existing ones."""
    assert len(set(slots)) == len(slots)
    assert not slots or (min(slots) >= 0 and max(slots) < count)
