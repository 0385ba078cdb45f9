"""The compilations that wait for the worker's compiling thread: API keys take turns, and a key's own come in order.

So 60 grammars of one key delay another's by the one that is being compiled, not by all of them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from moeserve.grammar.engine import CompiledGrammar


class CompilationQueue:
    """One compilation at a time. Of the keys that wait, that one is next whose last turn is longest ago."""

    def __init__(
        self, threads: ThreadPoolExecutor, compile_grammar: Callable[[str], CompiledGrammar]
    ) -> None:
        """`compile_grammar` runs on `threads`, which has one thread. It may raise GrammarError."""
        self._threads = threads
        self._compile_grammar = compile_grammar
        self._lock = Lock()
        self._waiting: OrderedDict[str, deque[tuple[str, Future[CompiledGrammar]]]] = OrderedDict()

    def add(self, key_name: str, grammar: str, compiled: Future[CompiledGrammar]) -> None:
        """Compiles `grammar` in the turn of `key_name`. The same `compiled` may wait with several keys: the first turn
        counts."""
        with self._lock:
            self._waiting.setdefault(key_name, deque()).append((grammar, compiled))
        self._threads.submit(self._take_turn)

    def _take_turn(self) -> None:
        """On the compiling thread, once for each `add`."""
        with self._lock:
            key_name, queue = self._waiting.popitem(last=False)
            grammar, compiled = queue.popleft()
            if queue:
                self._waiting[key_name] = queue  # behind the others
        if compiled.done():
            return
        try:
            compiled.set_result(self._compile_grammar(grammar))
        except BaseException as error:  # noqa: BLE001  any failure, Rust's panics too: whoever waits gets it
            compiled.set_exception(error)
