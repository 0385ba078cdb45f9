"""The guides of all request slots, and their masks, made while the device works.

After a step's tokens are known, one job on a helper thread takes each constrained request through its token and
computes what may follow; the next step's forward pass runs meanwhile, and only its sampling waits for the job. Another
thread compiles a new request's grammar while its prompt is computed. llguidance lets go of the GIL where it takes time.

A compilation may take a second, and others' answers must not wait for it. So a step waits a moment; then a row whose
grammar is not ready is late: what is sampled for it means nothing, until the router binds the request again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeserve.grammar.engine import STACK_BYTES, Bits, CompiledGrammar, GrammarEngine, threads_with_stack
from moeserve.grammar.errors import GrammarError
from moeserve.messages.sampling import SamplingParams, Thinking
from moeserve.messages.steps import COSTLY_MASK_MS
from moeserve.worker.grammar_compiler import GrammarCompiler
from moeserve.worker.guide import Guide

Int32s = NDArray[np.int32]

# CPU time of one token of one request. llguidance's limits leave a step 17 ms, but not all it does counts towards
# them: a text of 120 kB without any choice in it took 330 ms.
MAX_STEP_S: Final = 0.1
COMPILATION_WAIT_S: Final = 0.02  # of a step, for the grammars of new requests
_UNCONSTRAINED: Final = -1


@dataclass(frozen=True, slots=True)
class _Next:
    """What is known of a slot's next token."""

    is_masked: bool = False
    error: str | None = None  # the request cannot go on
    ms: float = 0.0  # CPU time that it took


class Verdicts(NamedTuple):
    """What the grammars say of a step's rows, by row."""

    failed: dict[int, str]  # why the request cannot go on
    late: set[int]  # its grammar is not ready
    mask_ms: dict[int, float]  # where a mask took long


class _Unstarted(NamedTuple):
    """A request whose guide is made when its grammar is compiled."""

    compiled: Future[CompiledGrammar] | None  # None: it has no grammar
    thinking: Thinking | None
    bad_sequences: tuple[tuple[int, ...], ...]
    output_ids: list[int]


class Constraints:
    """Written by the worker's step loop; `_guides` and `_masks` by the helper thread, whose jobs run one after
    another in the order of the calls."""

    def __init__(
        self,
        max_num_seqs: int,
        build_engine: Callable[[], GrammarEngine],
        compilation_wait: float = COMPILATION_WAIT_S,
    ) -> None:
        """`build_engine` runs on the compiling thread, at once: the worker goes on loading the model meanwhile. A step
        waits `compilation_wait` seconds at most for grammars."""
        self._compiler = GrammarCompiler(build_engine)
        self._helper = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        with threads_with_stack(STACK_BYTES):
            self._helper.submit(int)  # it starts its thread
        self._max_num_seqs = max_num_seqs
        self._compilation_wait = compilation_wait
        self._guides: dict[int, Guide] = {}
        self._masks: Bits | None = None  # int32 [max_num_seqs, words], by slot; made with the first guide
        self._unstarted: dict[int, _Unstarted] = {}  # by slot
        self._late: set[int] = set()  # slots whose grammar a step did not wait for
        self._next: dict[
            int, Future[dict[int, _Next]]
        ] = {}  # by slot: the newest job, whose result has the slot

    def bind(self, slot: int, sampling: SamplingParams, output_ids: Int32s, tenant: str = "") -> None:
        """Overwrites whatever the slot held. `output_ids` are there when a preempted request goes on. Tenants take
        turns at the compiler."""
        self._next.pop(slot, None)
        self._unstarted.pop(slot, None)
        self._late.discard(slot)
        if sampling.grammar or sampling.thinking is not None or sampling.bad_sequences:
            compiled = self._compiler.compile(sampling.grammar, tenant) if sampling.grammar else None
            self._unstarted[slot] = _Unstarted(
                compiled, sampling.thinking, sampling.bad_sequences, output_ids.tolist()
            )
            if compiled is None or compiled.done():
                self._begin(slot)

    def _begin(self, slot: int) -> None:
        self._next[slot] = self._helper.submit(self._start, slot, self._unstarted.pop(slot))

    def masks_for(self, slots: Int32s) -> tuple[Bits, Int32s] | None:
        """The masks and each row's index into them, -1 where the row may sample anything, or is late; None when all
        may. Waits for what the helper thread still does for these slots, but not long for a compilation."""
        if not self._next and not self._unstarted:
            return None
        index = np.full(len(slots), _UNCONSTRAINED, np.int32)
        deadline = time.monotonic() + self._compilation_wait
        for row, slot in enumerate(slots.tolist()):
            unstarted = self._unstarted.get(slot)
            if unstarted is not None:
                if slot in self._late or not _is_done(unstarted.compiled, deadline):
                    self._late.add(slot)  # until it is bound again: the plan in flight has a row of it
                    continue
                self._begin(slot)
            job = self._next.get(slot)
            if job is not None and job.result()[slot].is_masked:
                index[row] = slot
        if self._masks is None or index.max(initial=_UNCONSTRAINED) == _UNCONSTRAINED:
            return None
        return self._masks, index

    def verdicts(self, slots: Int32s) -> Verdicts:
        """What is to be said of these rows, after `masks_for`."""
        verdicts = Verdicts({}, set(), {})
        if not self._next and not self._late:
            return verdicts
        for row, slot in enumerate(slots.tolist()):
            job = self._next.get(slot)
            if slot in self._late:
                verdicts.late.add(row)
            elif job is not None:
                known = job.result()[slot]
                if known.error is not None:
                    verdicts.failed[row] = known.error
                elif known.ms > COSTLY_MASK_MS:
                    verdicts.mask_ms[row] = known.ms
        return verdicts

    def accept(self, slots: Int32s, token_ids: Int32s, verdicts: Verdicts) -> None:
        """Takes what was sampled for these slots, in the order of the rows, and starts on their next masks. The tokens
        of rows that have failed or are late mean nothing."""
        if not self._next:
            return
        going_on = [
            (slot, token_id)
            for row, (slot, token_id) in enumerate(zip(slots.tolist(), token_ids.tolist(), strict=True))
            if slot in self._next and token_id >= 0 and row not in verdicts.failed
        ]
        if going_on:
            job = self._helper.submit(self._advance, going_on)
            self._next.update(dict.fromkeys((slot for slot, _ in going_on), job))

    def close(self) -> None:
        """Ends the threads, after their jobs."""
        self._compiler.close()
        self._helper.shutdown()

    # ---- all below runs on the helper thread

    def _start(self, slot: int, request: _Unstarted) -> dict[int, _Next]:
        engine = self._compiler.engine.result()
        if self._masks is None:
            self._masks = np.zeros((self._max_num_seqs, engine.words), np.int32)
        try:
            matcher = None if request.compiled is None else request.compiled.result().matcher()
            guide = Guide(matcher, request.thinking, engine.eos_ids, request.bad_sequences)
            guide.accept_all(request.output_ids)
            self._guides[slot] = guide
            return {slot: _Next(guide.fill(self._masks[slot]))}
        except GrammarError as error:
            return {slot: _failure(error)}

    def _advance(self, sampled: list[tuple[int, int]]) -> dict[int, _Next]:
        return {slot: self._step(slot, token_id) for slot, token_id in sampled}

    def _step(self, slot: int, token_id: int) -> _Next:
        assert self._masks is not None
        started = time.thread_time()
        guide = self._guides[slot]
        try:
            guide.accept(token_id)
            is_masked = guide.fill(self._masks[slot])
        except GrammarError as error:
            return _failure(error)
        taken = time.thread_time() - started
        if taken > MAX_STEP_S:
            return _failure(f"a token took {taken:.2f} s; {MAX_STEP_S:g} s at most are spent on one")
        return _Next(is_masked, ms=taken * 1e3)


def _is_done(compiled: Future[CompiledGrammar] | None, deadline: float) -> bool:
    """Waits until `deadline`, a reading of time.monotonic()."""
    return compiled is None or bool(wait((compiled,), max(deadline - time.monotonic(), 0.0)).done)


def _failure(cause: object) -> _Next:
    return _Next(error=f"the grammar of this request cannot be followed any further: {cause}")
