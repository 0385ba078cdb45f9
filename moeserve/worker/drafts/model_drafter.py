"""Drafts by a small model of the same vocabulary (--speculative-model).

The small model is a decoder of its own on the large one's device. Its KV cache is addressed by the model's slots:
position p of a request has the same slot number in both caches. It computes a request's text only when the request
wants drafts:

    text       |.. computed ..|.. behind ..|    the last token is sampled
                              `- one pass -`    logits of the first draft, then one row for each further draft

A text of which the small model has read little yet (a prompt, an answer that was drafted by look-up) is read in pieces,
during several steps, so that other requests do not wait long; until it is read, nothing is drafted for it. Slots are
tagged with the text for which they were computed (`kv_tags.py`), so that a cached prefix is not read again.

A recurrent drafting model keeps one state per request slot, which only committed tokens advance; drafts advance a copy.
States are not cached, so the model reads even a cached prefix again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import torch

from moeserve.messages.steps import Row
from moeserve.worker.drafts.drafter import NO_DRAFT, Reading, Wanted
from moeserve.worker.drafts.foretold import Foretell, guess
from moeserve.worker.drafts.kv_tags import KvTags, Tags, first_tag, tags_of
from moeserve.worker.drafts.spent_time import SpentTime
from moeserve.worker.engines.small_model import SmallModel
from moeserve.worker.sequences import Int32s, Sequences, StepLayout

# Drafts that the small model itself considers less likely than this are not verified, nor are those after them.
LEAST_PROBABILITY = 0.5
# Tokens that a text may be behind to be computed together with its first draft: the drafts of a step, and one.
NEAR: Final = 17
# Tokens that are read in a step beside other requests' rows. Alone in a step, a request reads as many as a step holds.
PIECE = 128


class ModelDrafter:
    """A `Drafter` that drafts with a small model of the same vocabulary."""

    def __init__(
        self,
        sequences: Sequences,
        model: SmallModel,
        vocab_size: int,
        most_rows: int,
        num_kv_slots: int,
        reading: Reading,
        foretell: Foretell | None,
        least_probability: float = LEAST_PROBABILITY,
    ) -> None:
        """model: the small one. vocab_size: of the model that is drafted for. most_rows: of a step of the small model.
        num_kv_slots: of the pool. reading: where the time for reading texts is noted. foretell: draws as the request's
        sampler will, from logits of the large model's vocabulary; None: drafts are the small model's likeliest tokens
        at any temperature."""
        slots, positions = sequences.tokens.shape
        self._sequences = sequences
        self._model = model
        self._vocab_size = min(vocab_size, model.shape.vocab_size)
        self._foretell = foretell
        self._padded = torch.full([vocab_size], -math.inf)
        self._most_rows = most_rows
        self._near = min(NEAR, most_rows)
        self._least = least_probability
        # The small model's own view of the requests: their tokens as far as it knows them, and drafts.
        self._own = Sequences(slots, positions)
        self._own.kv_slots = sequences.kv_slots
        self._states: Int32s = np.arange(slots, dtype=np.int32)
        self._own.state_slots = self._states
        self._tags = KvTags(num_kv_slots)
        self._computed = [0] * slots  # leading tokens whose KV and state are there
        self._before: list[np.uint64] = [first_tag("")] * slots  # the tag of these
        self._reading = reading

    def bind(self, slot: int, namespace: str) -> None:
        self._computed[slot], self._before[slot] = 0, first_tag(namespace)

    def catch_up(self) -> None:
        """Does nothing; texts are computed in `draft`."""

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        """Notes the KV slots of the step's rows, which a GPU's engine does not. Texts are computed in `draft`."""
        self._own.kv_slots[layout.sequence, layout.position] = layout.kv_slots

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        drafts = [NO_DRAFT for _ in wanted]
        asking = [at for at, one in enumerate(wanted) if one.most > 0]
        if not asking:
            return drafts
        for at in asking:
            self._learn(wanted[at].slot, wanted[at].length)
        far = [wanted[at] for at in asking if self._behind(wanted[at]) > self._near]
        if far:
            self._read(far, self._most_rows if len(wanted) == 1 else min(PIECE, self._most_rows))
        ready = [at for at in asking if self._behind(wanted[at]) <= self._near]
        ready.sort(key=lambda at: self._behind(wanted[at]))  # rows of one token come first in a step
        most = min(self._model.most_sequences, self._most_rows // self._near)
        for first in range(0, len(ready), most):
            members = ready[first : first + most]
            for at, draft in zip(members, self._chains([wanted[at] for at in members]), strict=True):
                drafts[at] = np.array(draft, np.int32)
        return drafts

    # ---------------------------------------------------------------- texts

    def _behind(self, one: Wanted) -> int:
        return one.length - self._computed[one.slot]

    def _learn(self, slot: int, length: int) -> None:
        """Takes the new tokens of a text, and skips tokens whose KV is already in the cache. The last token is
        always computed, for its logits."""
        first = self._computed[slot]
        tokens = self._sequences.tokens[slot, first:length]
        # Embedding spans have negative numbers; the embedding table may be smaller than the other model's.
        is_known = (tokens >= 0) & (tokens < self._model.shape.vocab_size)
        self._own.tokens[slot, first:length] = np.where(is_known, tokens, 0)
        if self._model.has_states or length - first < 2:
            return
        tags = self._text_tags(slot, first, length - 1)
        valid = self._tags.num_valid(self._own.kv_slots[slot, first : length - 1], tags)
        if valid:
            self._computed[slot], self._before[slot] = first + valid, tags[valid - 1]

    def _text_tags(self, slot: int, first: int, end: int) -> Tags:
        """Returns the tags at positions first .. end-1, of which the first is the first that is not computed."""
        return tags_of(self._before[slot], self._sequences.tokens[slot, first:end], first)

    def _read(self, far: Sequence[Wanted], budget: int) -> None:
        """Computes all but the last tokens of these texts, at most `budget` tokens, beginning with the texts that lack
        the fewest."""
        began = SpentTime.begin()
        pieces: list[tuple[int, int]] = []
        for one in sorted(far, key=self._behind):
            count = min(self._behind(one) - 1, budget)
            budget -= count
            if count:
                pieces.append((one.slot, count))
        pieces.sort(key=lambda piece: piece[1])
        self._compute([(slot, self._computed[slot], count) for slot, count in pieces])
        self._model.wait()
        for slot, count in pieces:
            self._advance(slot, count)
        self._reading.ms += began.ms(on_gpu=self._reading.on_gpu)
        self._reading.lagging |= {one.slot for one in far if self._behind(one) > self._near}

    def _advance(self, slot: int, count: int) -> None:
        first = self._computed[slot]
        tags = self._text_tags(slot, first, first + count)
        self._tags.write(self._own.kv_slots[slot, first : first + count], tags)
        self._computed[slot], self._before[slot] = first + count, tags[-1]

    # ---------------------------------------------------------------- drafts

    def _chains(self, wanted: Sequence[Wanted]) -> list[list[int]]:
        """Returns the drafts of the requests whose texts are computed except for the last tokens, at most `_near` of
        them."""
        drafts: list[list[int]] = [[] for _ in wanted]
        pieces = [(one.slot, self._computed[one.slot], self._behind(one)) for one in wanted]
        layout = self._compute(pieces)
        active = list(range(len(wanted)))
        for depth in range(max(one.most for one in wanted)):
            found = list(self._guesses(layout, [(wanted[at], len(drafts[at])) for at in active]))
            if depth == 0:
                for slot, _, count in pieces:
                    self._advance(slot, count)
            going_on = []
            for at, (token, probability) in zip(active, found, strict=True):
                if probability >= self._least:
                    drafts[at].append(token)
                    if wanted[at].most > depth + 1:
                        going_on.append(at)
            active = going_on
            if not active:
                break
            if depth == 0:
                self._copy_states([wanted[at].slot for at in active])
            layout = self._compute_drafts([(wanted[at], drafts[at]) for at in active])
        self._own.state_slots = self._states
        return drafts

    def _compute_drafts(self, active: Sequence[tuple[Wanted, list[int]]]) -> StepLayout:
        """Computes the last draft of each of these, and tags its slot: it is not computed again if it is right."""
        pieces = []
        for one, draft in active:
            position = one.length + len(draft) - 1
            self._own.tokens[one.slot, position] = draft[-1]
            pieces.append((one.slot, position, 1))
        layout = self._compute(pieces)
        for one, draft in active:
            tags = tags_of(self._before[one.slot], np.array(draft, np.int32), one.length)
            slots = self._own.kv_slots[one.slot, one.length : one.length + len(draft)]
            self._tags.write(slots[-1:], tags[-1:])
        return layout

    def _copy_states(self, slots: Sequence[int]) -> None:
        """Copies the states of these request slots; drafts then advance the copies."""
        if not self._model.has_states:
            return
        copies = self._states + np.int32(len(self._states))
        source = np.array(slots, np.int32)
        self._model.copy_states(np.stack([source, copies[source]], axis=1))
        self._own.state_slots = copies

    # ---------------------------------------------------------------- the small model

    def _compute(self, pieces: Sequence[tuple[int, int, int]]) -> StepLayout:
        """Launches a step over (request slot, first position, tokens), whose last rows sample."""
        if self._model.has_states:
            new = [(-1, slot) for slot, first, _ in pieces if first == 0]
            if new:
                self._model.copy_states(np.array(new, np.int32))
        table = self._own.kv_slots
        layout = StepLayout(
            [
                Row(slot, first, count, table[slot, first : first + count].tobytes(), True)
                for slot, first, count in pieces
            ]
        )
        self._model.launch(layout, self._own)
        return layout

    def _guesses(
        self, layout: StepLayout, asking: Sequence[tuple[Wanted, int]]
    ) -> Iterator[tuple[int, float]]:
        """Yields the next draft after each sequence of the last step, and the probability that it is right, as far as
        the small model knows. asking: whose rows they are, and how many drafts they have."""
        found = self._model.likeliest(layout, self._vocab_size)
        for row, (one, made) in enumerate(asking):
            drawn = None
            if self._foretell is not None:
                drawn = self._foretell(self._whole(found.logits[row]), one.slot, one.length + made)
            yield (found.token_ids[row], found.probabilities[row]) if drawn is None else guess(drawn)

    def _whole(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits over the large model's vocabulary: -inf for tokens that the small model lacks. A view that
        the next call may overwrite."""
        if len(logits) == len(self._padded):
            return logits
        self._padded[: len(logits)] = logits
        return self._padded
