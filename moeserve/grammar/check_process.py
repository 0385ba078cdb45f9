"""The process that tries to compile grammars: `python -m moeserve.grammar.check_process MODEL`, in a Sandbox. It is a
process because a schema can make llguidance's compiler run for ever (1.9.1: `{"type": "integer", "multipleOf":
99999989}`), and a thread cannot be killed."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np

from moeserve.models.open import open_metadata
from moeserve.processes.sandbox import child
from moeserve.processes.sandbox.frames import receive_frame, send_frame
from moeserve.tokenizer.text_tokenizer import TextTokenizer

from .check_protocol import MAX_REQUEST_BYTES, Accepted, Refused, Reply, decode_spec, encode
from .engine import CHECK_STACK_BYTES, GrammarEngine, threads_with_stack
from .errors import GrammarError
from .faults import explained
from .spec import ANY_OBJECT, GrammarSpec
from .translate import to_grammar

MEMORY_BYTES: Final = 1 << 30  # address space for compiling, beyond that of the idle process
# The worker's batch may have to wait this long for a new request's grammar. 250 tools of ten parameters take as long.
MAX_CPU_S: Final = 0.3


def main() -> None:
    channel = child.begin("grammar")
    with threads_with_stack(CHECK_STACK_BYTES), ThreadPoolExecutor(1) as serving:
        serving.submit(_serve, channel).result()


def _serve(channel: socket.socket) -> None:
    engine = GrammarEngine(TextTokenizer.from_gguf(open_metadata(Path(sys.argv[1]))))
    check(engine, ANY_OBJECT)  # triggers what llguidance loads on first use, threads included
    child.confine(MEMORY_BYTES)
    send_frame(channel, encode(Refused("")))  # ready
    while True:
        try:
            spec = decode_spec(receive_frame(channel, MAX_REQUEST_BYTES))
        except (EOFError, ConnectionError):
            return
        send_frame(channel, encode(check(engine, spec)))


def check(engine: GrammarEngine, spec: GrammarSpec, clock: Callable[[], float] = time.thread_time) -> Reply:
    """Compiles the spec's grammar and computes its first mask. clock: CPU seconds of this thread."""
    try:
        grammar = to_grammar(spec)
        started = clock()  # times the work that the worker will repeat
        engine.matcher(grammar).fill(np.zeros(engine.words, np.int32))
    except GrammarError as error:
        return Refused(explained(engine, spec, error))
    taken = clock() - started
    if taken > MAX_CPU_S:
        return Refused(f"is too complex: compiling it takes {taken:.2f} s, more than {MAX_CPU_S:g} s")
    return Accepted(grammar)


if __name__ == "__main__":
    main()
