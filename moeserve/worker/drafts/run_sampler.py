"""Verifies drafts: samples each position as if it were a step of its own, until one differs from its draft.

Each round samples the next token of the rows that have matched so far. Between two rounds the sampler, the grammar
and the token table take the token, as between two steps. So every token is the same as without drafts, even with
penalties, masks, budgets and seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace
from torch import Tensor

from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.steps import Accepted, Sampled
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.drafts.draft_rows import DraftRows
from moeserve.worker.drafts.drafter import PendingTokens
from moeserve.worker.engines.engine import Engine, SampledAtOnce, TokenMasks
from moeserve.worker.sequences import Int32s, Sequences, StepLayout, entries


class DraftSampling(Protocol):
    """The sampling that is done only on request, for rows that may have drafts."""

    @property
    def logit_rows(self) -> int:
        """Largest number of rows for one call of `logits_of`."""
        ...

    def logits_of(self, rows: Int32s) -> Tensor:
        """Returns float32 [m, vocab], the logits of these rows of the step (at most `logit_rows`); valid until the
        next call."""
        ...

    def sample_at_once(
        self, logits: Tensor, slots: Int32s, ahead: Int32s
    ) -> Callable[[], SampledAtOnce] | None:
        """Launches the sampling of a token for each row of `logits` (float32 [rows, vocab]), without masks. slots:
        request slots; ahead: number of drafts of the same request before each row. Returns what waits for the tokens,
        to be called before the next sampling; None if a token depends on the tokens before it, or if it would save no
        time."""
        ...

    def sample_from(
        self, logits: Tensor, slots: Int32s, masks: TokenMasks | None
    ) -> tuple[Int32s, list[TokenLogprob | None]]:
        """Samples a token for each row of `logits`, float32 [rows, vocab], and waits for it. slots: the rows' request
        slots, all different; masks: allowed tokens. Returns the tokens (int32 [rows]) and each row's logprobs, None
        where none are asked for."""
        ...

    def commit_states(self, layout: StepLayout, accepted: Int32s) -> None:
        """Applies the accepted drafts of each row to the recurrent states, before they are next read; without this
        call they stay as before the drafts. accepted: int32 [rows]."""
        ...


class DraftingEngine(Engine, DraftSampling, Protocol):
    """An engine with `DraftSampling`, whose rows may therefore have drafts."""


class SampledRuns(NamedTuple):
    sampled: list[Sampled]  # one entry per sampling row
    mask_ms: dict[int, float]  # StepResult.mask_ms


class _Group(NamedTuple):
    """Rows whose logits are computed together; int32 [rows] each."""

    row: Int32s  # index in the step
    slot: Int32s
    first: Int32s  # index of the logits of its first token
    position: Int32s  # position of that token in the sequence
    depth: Int32s  # tokens that it may sample: 1 + drafts


class _AtOnce(NamedTuple):
    """A group whose sampling is launched."""

    group: _Group
    deep: list[Int32s]  # by number of drafts before a token: the group's rows that have such a token
    wait: Callable[[], SampledAtOnce]


class RunSampler:
    def __init__(
        self, engine: DraftSampling, sequences: Sequences, constraints: Constraints, rows: DraftRows
    ) -> None:
        self._engine = engine
        self._sequences = sequences
        self._constraints = constraints
        self._rows = rows
        self._layout: StepLayout | None = None  # of the step being sampled
        self._found = SampledRuns([], {})  # of its groups so far
        self._accepted: Int32s = np.zeros(0, np.int32)  # drafts of each row
        self._at_once: _AtOnce | None = None  # its last group, if that is not read yet

    def force(self, engine: DraftSampling) -> None:
        """Makes all later tokens come from `engine`."""
        self._engine = engine

    def launch(self, layout: StepLayout, drafted: Sequence[int], computed_s: float) -> None:
        """Launches the sampling of the step's rows in groups, reading each group's tokens before the next group is
        launched; the last group's are left for `read`. drafted: number of drafts of each row; computed_s: seconds for
        which the step computed before its logits."""
        self._layout, self._found = layout, SampledRuns([], {})
        self._accepted = np.zeros(len(layout.rows), np.int32)
        for group in self._groups(layout, drafted):
            self._read_group()
            self._launch_group(group, computed_s)

    def read(self) -> SampledRuns:
        """Waits for what was launched, and returns it."""
        layout, accepted = self._layout, self._accepted
        assert layout is not None
        self._read_group()
        if accepted.any():
            self._engine.commit_states(layout, accepted)
        self._rows.computed(layout, accepted)
        return self._found

    @property
    def pending_tokens(self) -> PendingTokens | None:
        """The launched step's rows, if none of their tokens is read and none depends on another; else None."""
        if self._at_once is None or self._found.sampled:
            return None
        group, deep, _ = self._at_once
        places, first = np.zeros((len(deep), len(group.row)), np.int32), 0
        for number, members in enumerate(deep):
            places[number, members] = np.arange(first, first + len(members))
            first += len(members)
        return PendingTokens(group.slot, group.first, group.position, group.depth - 1, places)

    def _groups(self, layout: StepLayout, drafted: Sequence[int]) -> Iterator[_Group]:
        """Yields the groups of sampling rows, in order."""
        rows = np.array([index for index, row in enumerate(layout.rows) if row.sample], np.int32)
        depth = 1 + np.array(drafted, np.int32)[rows]
        last = layout.offset[rows] + layout.count[rows]
        position = layout.start[rows] + layout.count[rows] - depth + 1
        columns = (rows, layout.req_slot[rows], last - depth, position, depth)
        first, size = 0, 0
        for at, more in enumerate(depth.tolist()):
            if size + more > self._engine.logit_rows:
                yield _Group(*(column[first:at] for column in columns))
                first, size = at, 0
            size += more
        if len(rows):
            yield _Group(*(column[first:] for column in columns))

    def _launch_group(self, group: _Group, computed_s: float) -> None:
        rounds = range(int(group.depth.max()))
        deep = [np.flatnonzero(group.depth > number).astype(np.int32) for number in rounds]
        logits = self._engine.logits_of(
            np.concatenate([group.first[members] + number for number, members in enumerate(deep)])
        )
        if self._constraints.are_free(group.slot):
            wait = self._engine.sample_at_once(logits, *_by_round(group, deep))
            if wait is not None:
                self._at_once = _AtOnce(group, deep, wait)
                return
        group = self._with_late_drafts(group)
        deep = deep[: int(group.depth.max())]
        self._add(group, self._sample_rounds(group, deep, logits, computed_s, self._found))

    def _read_group(self) -> None:
        """Waits for the group that was launched last, if any."""
        if self._at_once is None:
            return
        (group, deep, wait), self._at_once = self._at_once, None
        found = wait()
        group = self._with_late_drafts(group)
        self._add(group, self._keep(group, deep, found))

    def _add(self, group: _Group, runs: list[Sampled]) -> None:
        self._accepted[group.row] = [len(run.accepted.token_ids) if run.accepted else 0 for run in runs]
        self._found.sampled.extend(runs)

    def _with_late_drafts(self, group: _Group) -> _Group:
        """Waits for late drafts, which are of the step's only row. Returns the group without unlikely ones."""
        count = self._rows.take_late()
        return group if count is None else group._replace(depth=group.depth * 0 + 1 + count)

    def _keep(self, group: _Group, deep: Sequence[Int32s], found: SampledAtOnce) -> list[Sampled]:
        """Returns, from the tokens sampled at all positions, the ones that `_sample_rounds` would return. Done in one
        pass, as a GPU idles meanwhile."""
        places: list[list[int]] = [[] for _ in group.row]  # tokens of each row
        depth = group.depth.tolist()
        for place, row in enumerate(np.concatenate(deep).tolist()):
            if len(places[row]) < depth[row]:
                places[row].append(place)
        tokens, table = found.tokens.tolist(), self._sequences.tokens
        runs = entries(found.tokens[: len(places)], found.logprobs[: len(places)], {}, ())
        taken = np.zeros(len(places), np.int32)
        for row, (slot, position) in enumerate(
            zip(group.slot.tolist(), group.position.tolist(), strict=True)
        ):
            drafts = table[slot, position : position + len(places[row]) - 1].tolist()
            stops, kept, is_wrong = self._rows.stop_ids[slot], [], False
            for number, place in enumerate(places[row]):
                token = tokens[place]
                if token >= 0:
                    kept.append(place)
                is_wrong = token >= 0 and number < len(drafts) and token != drafts[number]
                if number == len(drafts) or token != drafts[number] or token in stops:
                    break
            taken[row] = len(kept)
            self._rows.length[slot] += len(kept)
            # the last token of a full context has no place
            room = table[slot, position : position + len(kept)]
            room[:] = found.tokens[kept[: len(room)]]
            if drafts:
                ids = [tokens[place] for place in kept[1:]]
                scores = [score for place in kept[1:] if (score := found.logprobs[place]) is not None]
                is_cut = len(ids) < len(drafts) and not is_wrong
                accepted = Accepted(len(drafts), ids, scores or None, is_cut)
                runs[row] = replace(runs[row], accepted=accepted)
        found.note(group.slot, taken)
        return runs

    def _sample_rounds(
        self, group: _Group, deep: Sequence[Int32s], logits: Tensor, computed_s: float, found: SampledRuns
    ) -> list[Sampled]:
        before = len(found.sampled)  # rows of earlier groups
        runs: list[Sampled] = []
        more: list[list[int]] = [[] for _ in group.row]
        scores: list[list[TokenLogprob]] = [[] for _ in group.row]
        wrong: set[int] = set()  # rows with a rejected draft
        active, first = deep[0], 0
        for number in range(len(deep)):
            slots = group.slot[active]
            if number == 0:
                masks = self._constraints.masks_for(slots, computed_s)
            else:
                ready, masks = self._constraints.follow(slots)
                active, slots = active[ready], slots[ready]
            if len(active) == 0:
                break
            tokens, logprobs = self._engine.sample_from(
                _rows_of(logits, first, np.searchsorted(deep[number], active), len(deep[number])),
                slots,
                masks,
            )
            verdicts = self._constraints.verdicts(slots)
            for row, ms in verdicts.mask_ms.items():
                found.mask_ms[before + int(active[row])] = ms
            goes_on = verdicts.kept(tokens)
            if number == 0:
                runs = entries(tokens, logprobs, verdicts.failed, verdicts.late)
            else:
                for row in np.flatnonzero(goes_on).tolist():
                    more[active[row]].append(int(tokens[row]))
                    logprob = logprobs[row]
                    if logprob is not None:
                        scores[active[row]].append(logprob)
            self._constraints.accept(slots, tokens, verdicts)
            goes_on = self._take(group, active, number, tokens, goes_on, wrong)
            first += len(deep[number])
            active = active[goes_on]
        for row in np.flatnonzero(group.depth > 1).tolist():
            drafted, ids = int(group.depth[row]) - 1, more[row]
            is_cut = len(ids) < drafted and row not in wrong
            runs[row] = replace(runs[row], accepted=Accepted(drafted, ids, scores[row] or None, is_cut))
        return runs

    def _take(
        self,
        group: _Group,
        active: Int32s,
        number: int,
        tokens: Int32s,
        is_token: np.ndarray,
        wrong: set[int],
    ) -> np.ndarray:
        """Records a round's tokens for these rows. Returns the rows that still match their drafts and have another
        one; adds the rows that differ to `wrong`."""
        slots, positions = group.slot[active], group.position[active] + number
        has_more = is_token & (group.depth[active] > number + 1)
        agrees = has_more.copy()
        places = slots[has_more], positions[has_more]
        agrees[has_more] = self._sequences.tokens[places] == tokens[has_more]
        wrong.update(active[has_more & ~agrees].tolist())
        self._sequences.append(slots[is_token], positions[is_token], tokens[is_token])
        self._rows.grew(slots[is_token])
        for row in np.flatnonzero(agrees).tolist():
            agrees[row] = int(tokens[row]) not in self._rows.stop_ids[slots[row]]
        return agrees


def _by_round(group: _Group, deep: Sequence[Int32s]) -> tuple[Int32s, Int32s]:
    """Returns the request slot of each row of a group's logits, and the number of drafts before it."""
    ahead = [np.full(len(members), number, np.int32) for number, members in enumerate(deep)]
    return np.concatenate([group.slot[members] for members in deep]), np.concatenate(ahead)


def _rows_of(logits: Tensor, first: int, places: np.ndarray, count: int) -> Tensor:
    """Returns the chosen rows among the `count` rows from `first` on; without a copy if all are chosen."""
    if len(places) == count:
        return logits[first : first + count]
    return logits[first + places]
