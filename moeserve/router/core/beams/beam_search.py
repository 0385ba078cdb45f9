"""The beam search algorithm: chooses the tokens that continue each beam, and collects answers. It is independent of
slots, requests and steps.

The rules are the same as for `generate(num_beams=...)` of Hugging Face's transformers 5:

- The candidates of a step are the continuations of all beams, best first. Candidates among the first `size` that end
(by an end token or at max_tokens) become answers; the best `size` candidates that do not end become the next beams.
- The best `size` answers are kept, ranked by score with the length penalty.

With several groups (diverse beam search, Vijayakumar et al. 2016, arXiv:1610.02424) each group follows these rules
separately. A group's candidate scores are reduced by `diversity_penalty` for each beam of the earlier groups that
takes the same token in this step. The penalty remains part of the beam's score, as in transformers 4. A finished
group no longer counts.

Only the top `num_candidates` tokens of each row are needed: at most `size` beams or answers come from one row,
besides end tokens, and earlier groups penalise at most as many tokens as they have beams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from moeserve.messages.beams import BeamParams, EarlyStopping
from moeserve.messages.sampling import SamplingParams, TokenLogprob


class Beam:
    """An unfinished answer as a linked list: its last token, and the beam before it. Beams share common beginnings."""

    __slots__ = ("before", "length", "logprob", "score")

    def __init__(self, before: Beam | None, logprob: TokenLogprob | None, score: float) -> None:
        self.before = before
        self.logprob = logprob  # of the last token; None for the empty beam
        self.score = score  # sum of log-probabilities, minus diversity penalties
        self.length: int = 0 if before is None else before.length + 1

    def logprobs(self) -> list[TokenLogprob]:
        """Returns the log-probabilities of all tokens, in order."""
        found: list[TokenLogprob] = []
        beam: Beam | None = self
        while beam is not None and beam.logprob is not None:
            found.append(beam.logprob)
            beam = beam.before
        found.reverse()
        return found


class FoundAnswer(NamedTuple):
    score: float  # with length penalty
    beam: Beam
    stop_token: int | None  # the beam's last token if it is an end token

    def text(self) -> list[TokenLogprob]:
        """Returns the log-probabilities of the answer's text, which does not include a stop token."""
        logprobs = self.beam.logprobs()
        return logprobs if self.stop_token is None else logprobs[:-1]


class Candidate(NamedTuple):
    score: float
    row: int  # index of the row that proposed it
    place: int  # index in the row's top tokens
    token_id: int
    beam: Beam  # the beam that it continues


class Continuation(NamedTuple):
    """A beam of the next step: the row that it continues, and the token."""

    row: int
    token_id: int


def candidates(
    beams: Sequence[Beam],
    rows: Sequence[int],
    tops: Sequence[TokenLogprob],
    excluded: Set[int],
    penalties: Mapping[int, float],
) -> list[Candidate]:
    """Returns the continuations of beams, best first; at equal scores the earlier beam comes first. rows: row of each
    beam; tops: top tokens by row; penalties: per token, subtracted from the score."""
    found = []
    for beam, row in zip(beams, rows, strict=True):
        top = tops[row]
        for place, (token_id, logprob) in enumerate(zip(top.top_ids, top.top_logprobs, strict=True)):
            if token_id not in excluded:
                score = beam.score + logprob - penalties.get(token_id, 0.0)
                found.append(Candidate(score, row, place, token_id, beam))
    found.sort(key=lambda one: -one.score)  # sort is stable
    return found


def is_exhausted(
    worst: float, best: float, length: int, max_tokens: int, penalty: float, early: EarlyStopping
) -> bool:
    """Returns whether a group with a full set of answers is finished: with `early` True at once, else when its best
    beam can no longer reach a better score than its worst answer. A score is a sum of natural log-probabilities divided
    by length ** penalty. worst: lowest score of its answers; best: sum of log-probabilities of its best beam, which has
    `length` tokens. With `early` "never" and a positive penalty, that beam counts as if it had `max_tokens` tokens."""
    if early is True:
        return True
    reach = max_tokens if early == "never" and penalty > 0 else length
    return bool(best / reach**penalty <= worst)


class BeamGroup:
    """A group of `size` beams that compete with each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.beams = [Beam(None, None, 0.0)]
        self.rows = [0]  # row of each beam in the step whose results come next
        self.answers: list[FoundAnswer] = []  # best first
        self.is_done = False


class BeamSearch:
    """One search, from the last row of the prompt to the answers."""

    def __init__(self, params: BeamParams, sampling: SamplingParams) -> None:
        self.params = params
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._shown = sampling.logprobs or 0
        self.num_candidates = params.width + len(self._stop_ids)
        self.restart()

    def restart(self) -> None:
        """Resets the search to its start."""
        self.length = 0  # tokens per beam
        self._groups = [BeamGroup(self.params.width // self.params.groups) for _ in range(self.params.groups)]

    def advance(self, tops: Sequence[TokenLogprob]) -> list[Continuation]:
        """Advances the search by one step. At the first call it takes the top tokens of the prompt's last row, later
        those of each beam that the previous call returned, in that order. Returns the beams of the next step; an empty
        list if the search is over."""
        self.length += 1
        taken = Counter[int]()
        continued: list[Continuation] = []
        for group in self._groups:
            if group.is_done:
                continue
            first = len(continued)
            continued += self._advance(group, tops, taken)
            group.rows = list(range(first, len(continued)))
            taken.update(one.token_id for one in continued[first:])
        return continued

    def _advance(
        self, group: BeamGroup, tops: Sequence[TokenLogprob], taken: Mapping[int, int]
    ) -> list[Continuation]:
        excluded: Set[int] = self._stop_ids if self.length <= self._min_tokens else frozenset()
        penalties = {token: count * self.params.diversity_penalty for token, count in taken.items()}
        is_last = self.length == self._max_tokens
        beams: list[Beam] = []
        continued: list[Continuation] = []
        for rank, one in enumerate(candidates(group.beams, group.rows, tops, excluded, penalties)):
            if rank >= group.size <= len(beams):
                break
            is_stop = one.token_id in self._stop_ids
            if is_stop or is_last:
                if rank < group.size:
                    self._found(group, self._beam(one, tops), one.token_id if is_stop else None)
            elif len(beams) < group.size:
                beams.append(self._beam(one, tops))
                continued.append(Continuation(one.row, one.token_id))
        group.answers.sort(key=lambda answer: -answer.score)
        del group.answers[group.size :]
        group.beams = beams
        group.is_done = not beams or (
            len(group.answers) == group.size
            and is_exhausted(
                group.answers[-1].score,
                beams[0].score,
                self.length,
                self._max_tokens,
                self.params.length_penalty,
                self.params.early_stopping,
            )
        )
        return [] if group.is_done else continued

    def _beam(self, one: Candidate, tops: Sequence[TokenLogprob]) -> Beam:
        top, shown = tops[one.row], self._shown
        logprob = TokenLogprob(
            one.token_id,
            top.top_logprobs[one.place],
            one.place + 1,
            top.top_ids[:shown],
            top.top_logprobs[:shown],
        )
        return Beam(one.beam, logprob, one.score)

    def _found(self, group: BeamGroup, beam: Beam, stop_token: int | None) -> None:
        score = beam.score / self.length**self.params.length_penalty
        group.answers.append(FoundAnswer(score, beam, stop_token))

    def answers(self) -> list[FoundAnswer]:
        """Returns the answers of all groups, best first."""
        found = [answer for group in self._groups for answer in group.answers]
        return sorted(found, key=lambda answer: -answer.score)
