"""Decides which tokens may come next in one request: a budget limits the reasoning, a grammar the answer, and banned
sequences neither may contain.

OPENING    before the first token: `<think>` if the model reasons, else the start of the answer
THINKING   any token until `</think>`; when the budget is spent, the end of the reasoning is forced; a tool call of the
           grammar also ends it
ANSWER     what the grammar allows; after a forced end, no second `</think>`, which a model that continues to reason
           would write

The state depends only on the tokens: after a preemption it is restored by accepting the output so far again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from enum import Enum, auto

from moeserve.grammar.engine import Bits, Matcher, clear_bits, set_bits
from moeserve.messages.reasoning import Thinking


class _Stage(Enum):
    OPENING = auto()
    THINKING = auto()
    ANSWER = auto()


class Guide:
    """The guide at the start of an output. matcher: None: any answer. thinking: None: no reasoning comes first."""

    def __init__(
        self,
        matcher: Matcher | None,
        thinking: Thinking | None,
        eos_ids: tuple[int, ...],
        bad_sequences: tuple[tuple[int, ...], ...] = (),
    ) -> None:
        """bad_sequences: token sequences that must not be completed, unless no other token is allowed."""
        # keyed by the last token before the completing one
        self._bad: defaultdict[int, list[tuple[int, ...]]] = defaultdict(list)
        for sequence in bad_sequences:
            self._bad[sequence[-2]].append(sequence)
        self._last = deque[int](maxlen=max(map(len, bad_sequences), default=1) - 1)
        self._matcher = matcher
        self._thinking = thinking
        self._eos_ids = eos_ids
        self._stage = _Stage.ANSWER if thinking is None else _Stage.OPENING
        self._reasoning = 0  # reasoning tokens so far
        self._before: int | None = None  # the last of them
        self._forced: deque[int] = deque()  # tokens that must come next, in order
        self._closed: tuple[int, ...] = ()  # the token that was forced to end the reasoning
        if thinking is not None and thinking.is_open:
            self._begin_reasoning(thinking)

    def accept(self, token_id: int) -> None:
        """Advances by a token. Raises GrammarError if it is not allowed; a token at a position where another is forced
        is not checked."""
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
        """Sets the bits of the tokens that may come next in mask, int32 [words] (see Matcher.fill). Returns False, with
        the mask unset, if all may. Banned sequences that would leave no token are ignored. Raises GrammarError if the
        mask cannot be computed."""
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
        """Returns the tokens that the grammar leaves no alternative to, as drafts."""
        if self._forced:
            return tuple(self._forced)
        if self._matcher is None or self._stage is not _Stage.ANSWER:
            return ()
        return self._matcher.forced()

    def _completing(self) -> tuple[int, ...]:
        """Returns the tokens that would complete a banned sequence, or end the reasoning a second time."""
        if not self._bad or not self._last:
            return self._closed
        last = tuple(self._last)
        near = self._bad.get(last[-1], ())
        bad = (sequence[-1] for sequence in near if last[1 - len(sequence) :] == sequence[:-1])
        return (*self._closed, *bad)

    def _fill_allowed(self, mask: Bits) -> bool:
        """Sets the bits that the reasoning and the grammar allow; result as in `fill`."""
        if self._forced:
            mask.fill(0)
            set_bits(mask, (self._forced[0],))
            return True
        if self._matcher is None:
            return False
        if self._stage is _Stage.THINKING:
            mask.fill(-1)
            clear_bits(mask, self._eos_ids)  # the answer has not started, so it may not end
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
            if self._matcher is not None:  # the grammar starts with the answer, after the separator
                self._forced.extend(thinking.ending[thinking.ending.index(token_id) + 1 :])
            if not self._forced:
                self._stage = _Stage.ANSWER
            return
        lead, before, self._before = thinking.call_lead, self._before, token_id
        if self._matcher is not None and token_id == thinking.call_token and lead in (None, before):
            self._stage = _Stage.ANSWER
            for one in (token_id,) if lead is None else (lead, token_id):
                self._matcher.accept(one)
            return
        self._reasoning += 1
        if self._reasoning == thinking.budget:
            self._force(thinking)
