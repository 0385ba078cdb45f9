"""The guides and masks of all request slots; masks are computed while the device works.

After a step's tokens are known, a helper thread advances each constrained request by its token and computes the next
mask while the forward pass of the next step runs; only sampling waits for the masks. Another thread compiles a new
request's grammar while its prompt is computed. llguidance releases the GIL during long work.

A compilation, or the masks of 63 answers, may take a second, for which other answers must not wait. So a step waits
briefly; after that, a row without its mask is late: its sampled token is ignored, and the router binds the request
again later. Work begun for it continues and is used then; no step waits for it a second time. If other rows are
ready, a step waits for expensive masks at most as long as its forward pass took, so these rows keep at least half
their speed even if the helper thread is rarely scheduled.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeserve.grammar.engine import Bits, GrammarEngine
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import COSTLY_MASK_MS
from moeserve.worker.constraints.grammar_compiler import GrammarCompiler
from moeserve.worker.constraints.guided_answer import GuidedAnswer, NextToken
from moeserve.worker.constraints.mask_thread import MaskThread

Int32s = NDArray[np.int32]

COMPILATION_WAIT_S: Final = 0.02  # longest wait of a step for the grammars of new requests
MASK_WAIT_S: Final = 0.05  # longest wait of a step for the masks of running requests
# A step waits at least this long for masks: being late costs a request three steps.
LEAST_WAIT_S: Final = 0.003
FORCED_WAIT_S: Final = 0.0005  # a step waits at least this long for forced tokens, for drafts
_UNCONSTRAINED: Final = -1


class Verdicts(NamedTuple):
    """The constraints' results for a step's rows, by row index."""

    failed: dict[int, str]  # why the request cannot continue
    late: set[int]  # rows whose mask was not ready
    mask_ms: dict[int, float]  # CPU time of expensive masks

    def kept(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Returns which rows have a token, bool [rows]: neither failed nor late. tokens: int32 [rows], -1 for none."""
        found = tokens >= 0
        found[[*self.failed, *self.late]] = False
        return found


class Constraints:
    """Owned by the worker's step loop. The helper thread writes an answer's mask; the step loop reads it once it is
    known."""

    def __init__(
        self,
        max_num_seqs: int,
        build_engine: Callable[[], GrammarEngine],
        compilation_wait: float = COMPILATION_WAIT_S,
        mask_wait: float = MASK_WAIT_S,
        *,
        drafts: bool = False,
    ) -> None:
        """build_engine: called on the compiling thread at once, while the worker loads the model. compilation_wait,
        mask_wait: seconds that a step waits at most for grammars, and for masks. drafts: whether `forced` will be
        called."""
        self._drafts = drafts
        self._compiler = GrammarCompiler(build_engine)
        self._thread = MaskThread()
        self._max_num_seqs = max_num_seqs
        self._compilation_wait = compilation_wait
        self._mask_wait = mask_wait
        self._masks: Bits | None = None  # int32 [2 * max_num_seqs, words]; allocated with the first answer
        self._free_masks = list(range(2 * max_num_seqs))
        self._answers: dict[int, GuidedAnswer] = {}  # by slot
        self._late: set[int] = set()  # slots whose answer was late
        self._kept: list[
            GuidedAnswer
        ] = []  # answers whose requests were late, oldest first, kept until these are bound again

    def bind(self, slot: int, sampling: SamplingParams, output_ids: Int32s, tenant: str = "") -> None:
        """Initialises a request slot. output_ids: not empty if a preempted request continues. tenant: for turns at
        the compiler."""
        self._late.discard(slot)
        if slot in self._answers:
            self._drop(self._answers.pop(slot))
        if sampling.grammar or sampling.thinking is not None or sampling.bad_sequences:
            output = output_ids.tolist()
            self._answers[slot] = self._take_kept(sampling, output) or self._begin(sampling, output, tenant)

    def are_free(self, slots: Int32s) -> bool:
        """Returns whether none of these requests has constraints."""
        held = self._answers.keys() | self._late
        return not held or held.isdisjoint(slots.tolist())

    def masks_for(self, slots: Int32s, computed_s: float = math.inf) -> tuple[Bits, Int32s] | None:
        """Returns the bit masks of allowed tokens, int32 [masks, words], and each row's index into them, int32 [rows]
        (-1: any token, or the row is late); None if all rows may sample any token. slots: int32 [rows], the rows'
        request slots. Waits briefly for the helper thread; for expensive masks, if other rows are ready, at most
        `computed_s`, the seconds for which the step has computed."""
        if not self._answers:
            return None
        index = np.full(len(slots), _UNCONSTRAINED, np.int32)
        started = time.monotonic()
        patience = max(computed_s, LEAST_WAIT_S) if self._has_ready(slots) else math.inf
        for row, slot in enumerate(slots.tolist()):
            answer = self._answers.get(slot)
            if answer is None:
                continue
            known = self._wait(answer, started, patience)
            if known is None:
                self._give_up(slot)
            elif known.is_masked:
                index[row] = answer.mask_row
        if self._masks is None or index.max(initial=_UNCONSTRAINED) == _UNCONSTRAINED:
            return None
        return self._masks, index

    def follow(self, slots: Int32s) -> tuple[NDArray[np.bool_], tuple[Bits, Int32s] | None]:
        """Returns, for one more token in the same step, which rows can be sampled now (bool [rows]), and their masks
        (see `masks_for`); None for the masks if no row is constrained. The other rows, whose expensive mask is not
        waited for, get this token in a later step and do not count as late. slots: the rows' request slots."""
        ready = np.ones(len(slots), np.bool_)
        if not self._answers:
            return ready, None
        index = np.full(len(slots), _UNCONSTRAINED, np.int32)
        deadline = time.monotonic() + LEAST_WAIT_S
        for row, slot in enumerate(slots.tolist()):
            answer = self._answers.get(slot)
            if answer is None:
                continue
            timeout = 0.0 if answer.ms > COSTLY_MASK_MS else max(deadline - time.monotonic(), 0.0)
            is_known = self._thread.wait(answer, timeout)
            known = answer.known
            if not is_known or known is None or known.error is not None:
                ready[row] = False
            elif known.is_masked:
                index[row] = answer.mask_row
        index = index[ready]
        if self._masks is None or index.max(initial=_UNCONSTRAINED) == _UNCONSTRAINED:
            return ready, None
        return ready, (self._masks, index)

    def forced(self, slots: Sequence[int]) -> list[tuple[int, ...]]:
        """Returns the tokens that follow because no other text is allowed, for slots where that is known at once."""
        deadline = time.monotonic() + FORCED_WAIT_S
        found: list[tuple[int, ...]] = [()] * len(slots)
        for row, slot in enumerate(slots):
            answer = self._answers.get(slot)
            if answer is None or not answer.has_started:
                continue
            if self._thread.wait(answer, max(deadline - time.monotonic(), 0.0)) and answer.known is not None:
                found[row] = answer.known.forced
        return found

    def verdicts(self, slots: Int32s) -> Verdicts:
        """Returns the constraints' results for these rows. Call it after `masks_for`."""
        verdicts = Verdicts({}, set(), {})
        if not self._answers and not self._late:
            return verdicts
        for row, slot in enumerate(slots.tolist()):
            answer = self._answers.get(slot)
            if slot in self._late:
                verdicts.late.add(row)
            elif answer is not None and answer.known is not None:
                if answer.known.error is not None:
                    verdicts.failed[row] = answer.known.error
                elif answer.known.ms > COSTLY_MASK_MS:
                    verdicts.mask_ms[row] = answer.known.ms
        return verdicts

    def accept(self, slots: Int32s, token_ids: Int32s, verdicts: Verdicts) -> None:
        """Takes the sampled tokens of these slots, in row order, and starts the computation of their next masks. slots,
        token_ids: int32 [rows]. Tokens of failed and late rows are ignored."""
        if not self._answers:
            return
        soon = []
        for row, (slot, token_id) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True)):
            answer = self._answers.get(slot)
            if answer is None or token_id < 0 or row in verdicts.failed:
                continue
            is_costly = answer.ms > COSTLY_MASK_MS
            answer.take(token_id)
            if is_costly:
                self._thread.later(answer, answer.advance)
            else:
                soon.append((answer, answer.advance))
        if soon:
            self._thread.soon(soon)

    def close(self) -> None:
        """Ends the threads after their current work."""
        self._compiler.close()
        self._thread.close()

    def _begin(self, sampling: SamplingParams, output: list[int], tenant: str) -> GuidedAnswer:
        compiled = self._compiler.compile(sampling.grammar, tenant) if sampling.grammar else None
        answer = GuidedAnswer(
            *(sampling, output, tenant, self._free_masks.pop(), compiled), drafts=self._drafts
        )
        start = partial(self._start, answer)
        if compiled is None:
            self._thread.soon([(answer, start)])
        else:
            compiled.add_done_callback(lambda _: self._thread.later(answer, start))
        return answer

    def _has_ready(self, slots: Int32s) -> bool:
        """Returns whether some row waits for nothing."""
        answers = (self._answers.get(slot) for slot in slots.tolist() if slot not in self._late)
        return any(answer is None or answer.known is not None for answer in answers)

    def _wait(self, answer: GuidedAnswer, started: float, patience: float) -> NextToken | None:
        """Waits for the next token's mask. Returns None if it is late."""
        if answer.known is None:
            most = self._mask_wait if answer.has_started else self._compilation_wait
            if answer.ms > COSTLY_MASK_MS:
                most = min(most, patience)
            left = started + most - time.monotonic()
            timeout = None if not answer.may_be_late else 0.0 if answer.was_late else max(left, 0.0)
            if not self._thread.wait(answer, timeout):
                return None
        answer.was_late = False
        return answer.known

    def _give_up(self, slot: int) -> None:
        answer = self._answers.pop(slot)
        answer.was_late = True
        self._late.add(slot)
        self._kept.append(answer)
        if len(self._kept) > self._max_num_seqs:
            self._drop(self._kept.pop(0))

    def _take_kept(self, sampling: SamplingParams, output: list[int]) -> GuidedAnswer | None:
        for at, answer in enumerate(self._kept):
            if answer.is_for(sampling, output):
                return self._kept.pop(at)
        return None

    def _drop(self, answer: GuidedAnswer) -> None:
        answer.is_dropped = True
        self._free_masks.append(answer.mask_row)

    # ---- runs on the helper thread

    def _start(self, answer: GuidedAnswer) -> NextToken:
        engine = self._compiler.engine.result()
        if self._masks is None:
            self._masks = np.zeros((2 * self._max_num_seqs, engine.words), np.int32)
        return answer.start(engine.eos_ids, self._masks[answer.mask_row])
