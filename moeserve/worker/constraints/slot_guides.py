"""The guides of all request slots, and their masks, made while the device works.

After a step's tokens are known, a helper thread takes each constrained request through its token and computes what may
follow; the next step's forward pass runs meanwhile, and only its sampling waits for the masks. Another thread compiles
a new request's grammar while its prompt is computed. llguidance lets go of the GIL where it takes time.

A compilation may take a second, and the masks of 63 answers as long. Others' answers must not wait for them. So a step
waits a moment; then a row whose mask is not there is late: what is sampled for it means nothing, until the router binds
the request again. What was begun for it goes on meanwhile, and is taken up then; no step waits for it a second time.
For costly masks that moment is no longer than the step has computed, where there are rows that are ready: however
seldom the system lets the helper thread run, those keep half of their speed.
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

COMPILATION_WAIT_S: Final = 0.02  # of a step, for the grammars of new requests
MASK_WAIT_S: Final = 0.05  # of a step, for the masks of requests that go on
LEAST_WAIT_S: Final = 0.003  # of the shortest step: to be late costs a request three steps
FORCED_WAIT_S: Final = 0.0005  # of the shortest step, for drafts
_UNCONSTRAINED: Final = -1


class Verdicts(NamedTuple):
    """The grammars' results for a step's rows, by row."""

    failed: dict[int, str]  # why the request cannot go on
    late: set[int]  # its mask is not there
    mask_ms: dict[int, float]  # where a mask took long


class Constraints:
    """Written by the worker's step loop. The helper thread writes an answer's mask, which is read when it is known."""

    def __init__(
        self,
        max_num_seqs: int,
        build_engine: Callable[[], GrammarEngine],
        compilation_wait: float = COMPILATION_WAIT_S,
        mask_wait: float = MASK_WAIT_S,
        *,
        drafts: bool = False,
    ) -> None:
        """`build_engine` runs on the compiling thread, at once: the worker goes on loading the model meanwhile. A step
        waits `compilation_wait` seconds at most for grammars, and `mask_wait` for masks. drafts: whether `forced` will
        be asked."""
        self._drafts = drafts
        self._compiler = GrammarCompiler(build_engine)
        self._thread = MaskThread()
        self._max_num_seqs = max_num_seqs
        self._compilation_wait = compilation_wait
        self._mask_wait = mask_wait
        self._masks: Bits | None = None  # int32 [2 * max_num_seqs, words]; made with the first answer
        self._free_masks = list(range(2 * max_num_seqs))
        self._answers: dict[int, GuidedAnswer] = {}  # by slot
        self._late: set[int] = set()  # slots whose answer a step did not wait for
        self._kept: list[
            GuidedAnswer
        ] = []  # those answers, the oldest first, until their requests are bound again

    def bind(self, slot: int, sampling: SamplingParams, output_ids: Int32s, tenant: str = "") -> None:
        """Overwrites whatever the slot held. `output_ids` are there when a preempted request goes on. Tenants take
        turns at the compiler."""
        self._late.discard(slot)
        if slot in self._answers:
            self._drop(self._answers.pop(slot))
        if sampling.grammar or sampling.thinking is not None or sampling.bad_sequences:
            output = output_ids.tolist()
            self._answers[slot] = self._take_kept(sampling, output) or self._begin(sampling, output, tenant)

    def are_free(self, slots: Int32s) -> bool:
        """Whether these requests may sample any token, now and later."""
        held = self._answers.keys() | self._late
        return not held or held.isdisjoint(slots.tolist())

    def masks_for(self, slots: Int32s, computed_s: float = math.inf) -> tuple[Bits, Int32s] | None:
        """The masks and each row's index into them, -1 where the row may sample anything, or is late; None when all
        may. Waits for what the helper thread still does for these slots, but not long: for costly masks, beside rows
        that are ready, `computed_s`, the seconds for which the step has computed."""
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
        """For a further token of the same step: which of these rows may be sampled now, and the masks of those (see
        `masks_for`). The others have theirs in a later step, and no one is late: a costly mask is not waited for."""
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
        """Tokens that are likely to come next, as no other text may, where that is known at once."""
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
        """Returns the grammars' results for these rows. Called after `masks_for`."""
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
        """Takes what was sampled for these slots, in the order of the rows, and starts on their next masks. The tokens
        of rows that have failed or are late mean nothing."""
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
        """Ends the threads, after what they are doing."""
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
        """Whether there is a row that waits for nothing."""
        answers = (self._answers.get(slot) for slot in slots.tolist() if slot not in self._late)
        return any(answer is None or answer.known is not None for answer in answers)

    def _wait(self, answer: GuidedAnswer, started: float, patience: float) -> NextToken | None:
        """Waits for the next token's mask; None if it is late."""
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
