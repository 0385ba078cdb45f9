"""Beam search by itself: which beams go on with which tokens, and which answers are found. It knows no slots, no
requests and no steps.

The rules are those of `generate(num_beams=...)` of Hugging Face's transformers 5:

- The candidates of a step are the continuations of all beams, best first. Of the first `size`, those that end (with an
  end token, or at max_tokens) are answers; the best `size` that do not end are the next beams.
- The best `size` answers are kept, by their scores with the length penalty.

With several groups (diverse beam search, Vijayakumar et al. 2016, arXiv:1610.02424) each group follows these rules for
itself, on scores from which its penalty is taken: `diversity_penalty` for each beam of the groups before that goes on
with the same token in this step. The penalty stays part of the beam's score, as in transformers 4. A group that has
ended counts no more.

Each beam needs the top `num_candidates` tokens of its row only: `size` beams or answers come out of it at most, beside
its end tokens, and the groups before can push down no more tokens than they have beams.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from moeserve.messages.beams import BeamParams, EarlyStopping
from moeserve.messages.sampling import SamplingParams, TokenLogprob


class Beam:
    """An unfinished answer: its last token, behind another beam. Beams share what they have in common."""

    __slots__ = ("before", "length", "logprob", "score")

    def __init__(self, before: Beam | None, logprob: TokenLogprob | None, score: float) -> None:
        self.before = before
        self.logprob = logprob  # of the last token; None for the beam without tokens
        self.score = score  # sum of log-probabilities, less penalties for tokens of other groups
        self.length: int = 0 if before is None else before.length + 1

    def logprobs(self) -> list[TokenLogprob]:
        """One for each token, in order."""
        found: list[TokenLogprob] = []
        beam: Beam | None = self
        while beam is not None and beam.logprob is not None:
            found.append(beam.logprob)
            beam = beam.before
        found.reverse()
        return found


class FoundAnswer(NamedTuple):
    score: float  # with the length penalty
    beam: Beam
    stop_token: int | None  # the beam's last token, where it ended the answer

    def text(self) -> list[TokenLogprob]:
        """One for each token of the answer's text, of which a stop token is no part."""
        logprobs = self.beam.logprobs()
        return logprobs if self.stop_token is None else logprobs[:-1]


class Candidate(NamedTuple):
    score: float
    row: int  # whose top tokens it is of
    place: int  # among them
    token_id: int
    beam: Beam  # that it continues


class Continuation(NamedTuple):
    """A beam of the next step: the row of this step that it continues, with which token."""

    row: int
    token_id: int


def candidates(
    beams: Sequence[Beam],
    rows: Sequence[int],
    tops: Sequence[TokenLogprob],
    excluded: Set[int],
    penalties: Mapping[int, float],
) -> list[Candidate]:
    """Returns the continuations of beams, best first; of equal ones, that of the first beam. tops: by row; rows: each
    beam's row; penalties: by token, subtracted from a beam's score."""
    found = []
    for beam, row in zip(beams, rows, strict=True):
        top = tops[row]
        for place, (token_id, logprob) in enumerate(zip(top.top_ids, top.top_logprobs, strict=True)):
            if token_id not in excluded:
                score = beam.score + logprob - penalties.get(token_id, 0.0)
                found.append(Candidate(score, row, place, token_id, beam))
    found.sort(key=lambda one: -one.score)  # stable
    return found


def is_exhausted(
    worst: float, best: float, length: int, max_tokens: int, penalty: float, early: EarlyStopping
) -> bool:
    """Whether a group that has as many answers as beams is done. worst: the lowest score of its answers; best: the sum
    of its best beam, of `length` tokens."""
    if early is True:
        return True
    reach = max_tokens if early == "never" and penalty > 0 else length
    return bool(best / reach**penalty <= worst)


class BeamGroup:
    """`size` beams that compete with one another."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.beams = [Beam(None, None, 0.0)]
        self.rows = [0]  # of each beam, in the step whose results are taken next
        self.answers: list[FoundAnswer] = []  # best first
        self.is_done = False


class BeamSearch:
    """One search, from the prompt's last row to its answers."""

    def __init__(self, params: BeamParams, sampling: SamplingParams) -> None:
        self.params = params
        self._max_tokens = sampling.max_tokens
        self._min_tokens = sampling.min_tokens
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._shown = sampling.logprobs or 0
        self.num_candidates = params.width + len(self._stop_ids)
        self.restart()

    def restart(self) -> None:
        """Resets the search to its state before the first step."""
        self.length = 0  # tokens of each beam
        self._groups = [BeamGroup(self.params.width // self.params.groups) for _ in range(self.params.groups)]

    def advance(self, tops: Sequence[TokenLogprob]) -> list[Continuation]:
        """Takes the top tokens of each row: of the prompt's last row, or of each continuation of the step before, in
        order. Returns the beams of the next step; an empty list if the search is over."""
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
        """The answers of all groups, best first."""
        found = [answer for group in self._groups for answer in group.answers]
        return sorted(found, key=lambda answer: -answer.score)
