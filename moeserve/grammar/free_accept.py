"""Lets a matcher take a token without the GIL.

llguidance holds the GIL while a matcher takes a token. With an ambiguous grammar that takes several milliseconds, in
which no other thread of the process runs. It releases the GIL only in its call for several matchers, which uses threads
of its own. So a costly matcher is passed to that call together with a dummy matcher that has already failed and ignores
its token.
"""

from __future__ import annotations

import functools
import os
from typing import Final

import llguidance

_STACK: Final = "RUST_MIN_STACK"  # stack size in bytes of threads that Rust code starts
_NO_TOKEN: Final = 0


class FreeAccept:
    """Accepts tokens without the GIL. For use by one thread."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, stack_bytes: int) -> None:
        """stack_bytes: stack of llguidance's threads, shared by all instances; the first instance decides."""
        self._executor = _executor(stack_bytes)
        self._failed = llguidance.LLMatcher(tokenizer, "", log_level=0)
        assert self._failed.is_error()

    def accept(self, matcher: llguidance.LLMatcher, token_id: int) -> None:
        """Does the same as `matcher.consume_token`."""
        self._executor.consume_token_par([(matcher, token_id), (self._failed, _NO_TOKEN)])


@functools.cache
def _executor(stack_bytes: int) -> llguidance.LLExecutor:
    before = os.environ.get(_STACK)
    os.environ[_STACK] = str(stack_bytes)
    try:
        return llguidance.LLExecutor(1)
    finally:
        if before is None:
            del os.environ[_STACK]
        else:
            os.environ[_STACK] = before
