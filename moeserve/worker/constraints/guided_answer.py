"""One constrained request in the worker, from the moment it is bound: its guide, and the mask of its next token.

bind ──▶ start ──▶ known ──▶ accept ──▶ known ──▶ ...
         │ the grammar is compiled, the guide taken through the output so far
                             └ the guide takes the token that was sampled, and says what may follow
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

# CPU time of one token of one request. llguidance's limits leave a step 17 ms, but not all it does counts towards
# them: a text of 120 kB without any choice in it took 330 ms.
MAX_STEP_S: Final = 0.1
COSTLY_FOR_DRAFTS_S: Final = (
    0.001  # of a mask behind which no forced tokens are looked for: they take as long
)


class NextToken(NamedTuple):
    """The constraints on an answer's next token, as far as they are known."""

    is_masked: bool = False
    error: str | None = None  # the request cannot go on
    ms: float = 0.0  # CPU time that it took
    forced: tuple[
        int, ...
    ] = ()  # where drafts are asked for: tokens that are likely to come, as no other text may


class GuidedAnswer:
    """`start` and `advance` run on the thread that makes masks, one call after another."""

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
        """`output_ids` become its own. `mask_row`: of the masks of all. `compiled` None: it has no grammar. drafts:
        whether to tell forced tokens."""
        self._drafts = drafts
        self._sampling = sampling
        self._compiled = compiled
        self._matcher: Matcher | None = None
        self._guide: Guide | None = None
        self._mask: Bits | None = None
        self._output = output_ids
        self.tenant = tenant
        self.mask_row = mask_row
        # Written by the thread that makes masks, and set to None by the step loop before it asks for more.
        self.known: NextToken | None = None
        self.ms = 0.0  # what its last mask took
        self.was_late = False  # a step did not wait for what is not known yet
        self.is_dropped = False  # another may have its mask's row: nothing is to be done for it any more

    @property
    def may_be_late(self) -> bool:
        """An answer without a grammar is never late."""
        return self._compiled is not None

    def is_for(self, sampling: SamplingParams, output_ids: Sequence[int]) -> bool:
        """Whether a request with this output would be where this one is. All else follows from the tokens."""
        mine = self._sampling
        return (
            mine.grammar == sampling.grammar
            and mine.thinking == sampling.thinking
            and mine.bad_sequences == sampling.bad_sequences
            and self._output == output_ids
        )

    def take(self, token_id: int) -> None:
        """Notes the token that `advance` will be called with."""
        self._output.append(token_id)
        self.known = None

    @property
    def has_started(self) -> bool:
        return self._guide is not None

    def start(self, eos_ids: tuple[int, ...], mask: Bits) -> NextToken:
        """`mask` (int32 [words]) is overwritten with what may come next, here and in `advance`. Told is what the mask
        took, not the tokens before it: the next one may take as long."""
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
        """Takes the last token."""
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
        """taken: seconds. Raises GrammarError."""
        assert self._guide is not None
        forced: tuple[int, ...] = ()
        if self._drafts and is_masked and taken < COSTLY_FOR_DRAFTS_S:
            forced = self._guide.forced()
        return NextToken(is_masked, ms=taken * 1e3, forced=forced)

    def _seconds(self) -> float:
        """CPU time spent so far, from some start."""
        return time.thread_time() + (0.0 if self._matcher is None else self._matcher.elsewhere_s)


def _failure(cause: object) -> NextToken:
    return NextToken(error=f"the grammar of this request cannot be followed any further: {cause}")
