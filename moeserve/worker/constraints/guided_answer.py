"""A constrained request in the worker: its guide, and the mask of its next token.

bind ──▶ start ──▶ known ──▶ accept ──▶ known ──▶ ...
         │                   └ the guide takes the sampled token and computes what may follow
         └ the grammar is compiled, and the guide takes the output so far
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Final, NamedTuple

from moeserve.grammar.engine import Bits, CompiledGrammar, Matcher
from moeserve.grammar.errors import GrammarError
from moeserve.messages.sampling import SamplingParams
from moeserve.worker.constraints.guide import Guide

# CPU time limit for one token of one request. llguidance's own limits amount to 17 ms, but do not count all of its
# work: a text of 120 kB without any choice took 330 ms.
MAX_STEP_S: Final = 0.1
# After a slower mask, forced tokens are not searched: the search takes as long as the mask.
COSTLY_FOR_DRAFTS_S: Final = 0.001


class NextToken(NamedTuple):
    """The constraint on an answer's next token."""

    is_masked: bool = False
    error: str | None = None  # why the request cannot continue
    ms: float = 0.0  # CPU time spent on it
    forced: tuple[int, ...] = ()  # if drafts are wanted: the next tokens, if the grammar dictates them


class GuidedAnswer:
    """`start` and `advance` run one after another on the mask thread."""

    def __init__(
        self,
        sampling: SamplingParams,
        output_ids: list[int],
        tenant: str,
        mask_row: int,
        compiled: Future[CompiledGrammar] | None,
        *,
        drafts: bool = False,
    ) -> None:
        """output_ids: the output so far; the object takes ownership. mask_row: its row in the array of masks.
        compiled: None without a grammar. drafts: whether to compute forced tokens."""
        self._drafts = drafts
        self._sampling = sampling
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._guide: Guide | None = None
        self._mask: Bits | None = None
        self._output = output_ids
        self.tenant = tenant
        self.mask_row = mask_row
        # Written by the mask thread; the step loop sets it to None before it asks for the next token.
        self.known: NextToken | None = None
        self.ms = 0.0  # CPU time of the last mask
        self.was_late = False  # a step did not wait for its mask
        self.is_dropped = False  # True: do no more work for it; another answer may own its mask row

    @property
    def may_be_late(self) -> bool:
        """False without a grammar: an answer without one is never late."""
        return self._compiled is not None

    def is_for(self, sampling: SamplingParams, output_ids: Sequence[int]) -> bool:
        """Returns whether a request with these parameters and this output is in the same state as this one."""
        mine = self._sampling
        return (
            mine.grammar == sampling.grammar
            and mine.thinking == sampling.thinking
            and mine.bad_sequences == sampling.bad_sequences
            and self._output == output_ids
        )

    def take(self, token_id: int) -> None:
        """Notes the token for which `advance` will be called."""
        self._output.append(token_id)
        self.known = None

    @property
    def has_started(self) -> bool:
        return self._guide is not None

    def start(self, eos_ids: tuple[int, ...], mask: Bits) -> NextToken:
        """Computes the mask of the answer's next token into `mask`, and returns whether there is one, and its CPU time;
        a grammar that fails is returned as the result's error. mask: int32 [words], overwritten here and in `advance`.
        The result's time is the time for the mask itself, without the output so far, as an estimate for the next
        mask."""
        self._mask = mask
        try:
            if self._compiled is not None:
                self._matcher = self._compiled.result().matcher()
            guide = Guide(self._matcher, self._sampling.thinking, eos_ids, self._sampling.bad_sequences)
            guide.accept_all(self._output)
            self._guide = guide
            started = self._seconds()
            is_masked = guide.fill(mask)
            return self._next(is_masked, self._seconds() - started)
        except GrammarError as error:
            return _failure(error)

    def advance(self) -> NextToken:
        """Advances by the last token, and computes the next mask."""
        assert self._guide is not None
        assert self._mask is not None
        started = self._seconds()
        try:
            self._guide.accept(self._output[-1])
            is_masked = self._guide.fill(self._mask)
            taken = self._seconds() - started
            if taken > MAX_STEP_S:
                return _failure(f"a token took {taken:.2f} s; {MAX_STEP_S:g} s at most are spent on one")
            return self._next(is_masked, taken)
        except GrammarError as error:
            return _failure(error)

    def _next(self, is_masked: bool, taken: float) -> NextToken:
        """Computes the next mask. taken: seconds so far. Raises GrammarError."""
        assert self._guide is not None
        forced: tuple[int, ...] = ()
        if self._drafts and is_masked and taken < COSTLY_FOR_DRAFTS_S:
            forced = self._guide.forced()
        return NextToken(is_masked, ms=taken * 1e3, forced=forced)

    def _seconds(self) -> float:
        """Returns a reading of the thread's CPU clock, in seconds."""
        return time.thread_time() + (0.0 if self._matcher is None else self._matcher.elsewhere_s)


def _failure(cause: object) -> NextToken:
    return NextToken(error=f"the grammar of this request cannot be followed any further: {cause}")
