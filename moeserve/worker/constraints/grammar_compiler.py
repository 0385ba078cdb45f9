"""Compiles grammars on a thread of its own. A compilation takes up to a second, so tenants take turns: who sends sixty
schemas waits behind himself, not in front of others."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from moeserve.grammar.engine import STACK_BYTES, CompiledGrammar, GrammarEngine, threads_with_stack

MAX_COMPILED: Final = 128  # more than requests run, so that one that was late finds its grammar


class _Waiting(NamedTuple):
    grammar: str
    compiled: Future[CompiledGrammar]


class GrammarCompiler:
    """Compiles grammars for one thread. Tenants take turns: the next tenant is the one whose last turn is longest ago,
    and its oldest waiting grammar is compiled."""

    def __init__(self, build_engine: Callable[[], GrammarEngine]) -> None:
        """`build_engine` runs on the thread, at once."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        with threads_with_stack(STACK_BYTES):
            self.engine: Future[GrammarEngine] = self._thread.submit(build_engine)
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()  # the oldest use first
        self._lock = threading.Lock()  # of what waits
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()  # by tenant, the next tenant first

    def compile(self, grammar: str, tenant: str) -> Future[CompiledGrammar]:
        """Returns the future of this grammar, the same one for all requests. Its exception is a GrammarError if the
        grammar is wrong."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = Future()
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        if not (compiled.done() or compiled.running()):
            # Several tenants may wait for one grammar: the first turn compiles it for all.
            with self._lock:
                self._waiting.setdefault(tenant, deque()).append(_Waiting(grammar, compiled))
            self._thread.submit(self._take_turn)
        return compiled

    def close(self) -> None:
        """Ends the thread, after its jobs."""
        self._thread.shutdown()

    # ---- all below runs on the compiling thread

    def _take_turn(self) -> None:
        waiting = self._next()
        if waiting is None:  # others' turns have compiled all
            return
        waiting.compiled.set_running_or_notify_cancel()
        try:
            waiting.compiled.set_result(self.engine.result().compile(waiting.grammar))
        except Exception as error:
            waiting.compiled.set_exception(error)
            raise  # into a future that is never read

    def _next(self) -> _Waiting | None:
        with self._lock:
            while self._waiting:
                tenant, queue = self._waiting.popitem(last=False)
                while queue and queue[0].compiled.done():
                    queue.popleft()
                if queue:
                    self._waiting[tenant] = queue  # behind the others
                    return queue.popleft()
        return None
