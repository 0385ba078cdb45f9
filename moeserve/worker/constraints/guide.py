"""What one request's next token may be: a budget bounds its reasoning, a grammar its answer, and neither may contain
certain sequences of tokens.

    OPENING    the answer's first token: `<think>` where the model thinks, or else of the answer already
    THINKING   anything, until `</think>`; when the budget is spent, the reasoning's ending is forced; a call of the
               grammar ends it, too
    ANSWER     what the grammar allows; behind a forced ending no second `</think>`, which a model writes that goes on
               thinking

Driven by the tokens alone, so a request that was preempted is where it was once its output has been accepted again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from enum import Enum, auto

from moeserve.grammar.engine import Bits, Matcher, clear_bits, set_bits
from moeserve.messages.sampling import Thinking


class _Stage(Enum):
    OPENING = auto()
    THINKING = auto()
    ANSWER = auto()


class Guide:
    """At the beginning of the output. `matcher` None: any answer; `thinking` None: no reasoning comes first."""

    def __init__(
        self,
        matcher: Matcher | None,
        thinking: Thinking | None,
        eos_ids: tuple[int, ...],
        bad_sequences: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """`bad_sequences`: none of them may be completed, unless nothing else may come."""
        self._bad: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)  # by the last token but one
        for sequence in bad_sequences:
            self._bad[sequence[-2]].append(sequence)
        self._last = deque[int](maxlen=max(map(len, bad_sequences), default=1) - 1)
        self._matcher = matcher
        self._thinking = thinking
        self._eos_ids = eos_ids
        self._stage = _Stage.ANSWER if thinking is None else _Stage.OPENING
        self._reasoning = 0  # reasoning tokens so far
        self._forced: deque[int] = deque()  # the only tokens that may come, in order
        self._closed: tuple[int, ...] = ()  # the token that has been forced to end the reasoning
        if thinking is not None and thinking.is_open:
            self._begin_reasoning(thinking)

    def accept(self, token_id: int) -> None:
        """Takes the token that came. Raises GrammarError for one that may not come."""
        self._last.append(token_id)
        if self._forced:
            self._forced.popleft()
            if not self._forced:
                self._stage = _Stage.ANSWER
            return
        if self._stage is not _Stage.ANSWER:
            assert self._thinking is not None
            if self._stage is _Stage.THINKING:
                self._accept_reasoning(self._thinking, token_id)
                return
            if token_id == self._thinking.open_token:
                self._begin_reasoning(self._thinking)
                return
            self._stage = _Stage.ANSWER
        if self._matcher is not None:
            self._matcher.accept(token_id)

    def accept_all(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            self.accept(token_id)

    def fill(self, mask: Bits) -> bool:
        """Sets the bits of the tokens that may come next (see Matcher.fill), or returns False: all may. Raises
        GrammarError."""
        is_masked = self._fill_allowed(mask)
        if self._forced or not (bad := self._completing()):
            return is_masked
        if not is_masked:
            mask.fill(-1)
        before = mask.copy()
        clear_bits(mask, bad)
        if not mask.any():
            mask[:] = before
        return True

    def forced(self) -> tuple[int, ...]:
        """Tokens that are likely to come, as no other text may."""
        if self._forced:
            return tuple(self._forced)
        if self._matcher is None or self._stage is not _Stage.ANSWER:
            return ()
        return self._matcher.forced()

    def _completing(self) -> tuple[int, ...]:
        """The tokens that would complete a bad sequence now, or end the reasoning that has been ended."""
        if not self._bad or not self._last:
            return self._closed
        last = tuple(self._last)
        near = self._bad.get(last[-1], ())
        bad = (sequence[-1] for sequence in near if last[1 - len(sequence) :] == sequence[:-1])
        return (*self._closed, *bad)

    def _fill_allowed(self, mask: Bits) -> bool:
        """Allows the tokens that the reasoning and the grammar allow, as `fill`."""
        if self._forced:
            mask.fill(0)
            set_bits(mask, (self._forced[0],))
            return True
        if self._matcher is None:
            return False
        if self._stage is _Stage.THINKING:
            mask.fill(-1)
            clear_bits(mask, self._eos_ids)  # an answer is owed
            return True
        self._matcher.fill(mask)
        if self._stage is _Stage.OPENING:
            assert self._thinking is not None
            set_bits(mask, (self._thinking.open_token,))
        return True

    def _begin_reasoning(self, thinking: Thinking) -> None:
        self._stage = _Stage.THINKING
        if thinking.budget == 0:
            self._force(thinking)

    def _force(self, thinking: Thinking) -> None:
        self._forced.extend(thinking.ending)
        self._closed = (thinking.close_token,)

    def _accept_reasoning(self, thinking: Thinking, token_id: int) -> None:
        if token_id == thinking.close_token:
            if self._matcher is not None:  # it starts where the answer does: behind what separates the two
                self._forced.extend(thinking.ending[thinking.ending.index(token_id) + 1 :])
            if not self._forced:
                self._stage = _Stage.ANSWER
            return
        if self._matcher is not None and token_id == thinking.call_token:
            self._stage = _Stage.ANSWER
            self._matcher.accept(token_id)
            return
        self._reasoning += 1
        if self._reasoning == thinking.budget:
            self._force(thinking)
