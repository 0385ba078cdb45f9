"""Compiles grammars on a separate thread. A compilation takes up to a second, so tenants take turns: a tenant that
sends sixty schemas delays only itself."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, NamedTuple

from moeserve.grammar.engine import STACK_BYTES, CompiledGrammar, GrammarEngine, threads_with_stack

# more than the number of running requests, so that a request that was late finds its grammar
MAX_COMPILED: Final = 128


class _Waiting(NamedTuple):
    grammar: str
    compiled: Future[CompiledGrammar]


class GrammarCompiler:
    """Compiles grammars on one thread. The next turn goes to the tenant whose last turn was longest ago, and to its
    oldest waiting grammar."""

    def __init__(self, build_engine: Callable[[], GrammarEngine]) -> None:
        """build_engine: called on the thread at once."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="compile")
        with threads_with_stack(STACK_BYTES):
            self.engine: Future[GrammarEngine] = self._thread.submit(build_engine)
        self._compiled: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()  # guards `_waiting`
        self._waiting: OrderedDict[str, deque[_Waiting]] = OrderedDict()  # by tenant; the next tenant first

    def compile(self, grammar: str, tenant: str) -> Future[CompiledGrammar]:
        """Returns the future of a compiled grammar, shared by all requests with it. The future raises GrammarError
        for an invalid grammar."""
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = Future()
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        if not (compiled.done() or compiled.running()):
            # Several tenants may wait for one grammar; the first turn compiles it for all.
            with self._lock:
                self._waiting.setdefault(tenant, deque()).append(_Waiting(grammar, compiled))
            self._thread.submit(self._take_turn)
        return compiled

    def close(self) -> None:
        """Ends the thread after the waiting jobs."""
        self._thread.shutdown()

    # ---- all below runs on the compiling thread

    def _take_turn(self) -> None:
        waiting = self._next()
        if waiting is None:  # all were compiled in other tenants' turns
            return
        waiting.compiled.set_running_or_notify_cancel()
        try:
            waiting.compiled.set_result(self.engine.result().compile(waiting.grammar))
        except Exception as error:
            waiting.compiled.set_exception(error)
            raise  # its future is never read

    def _next(self) -> _Waiting | None:
        with self._lock:
            while self._waiting:
                tenant, queue = self._waiting.popitem(last=False)
                while queue and queue[0].compiled.done():
                    queue.popleft()
                if queue:
                    self._waiting[tenant] = queue  # moves to the end of the queue
                    return queue.popleft()
        return None
