"""Lets a matcher take a token without the GIL.

llguidance keeps the GIL while one matcher takes a token: of an ambiguous grammar for several milliseconds, in which no
other thread of the process runs. It lets go of it only where several matchers take theirs together, on threads of its
own. So a costly matcher takes its token beside another one, which has failed before and takes none.
"""

from __future__ import annotations

import functools
import os
from typing import Final

import llguidance

_STACK: Final = "RUST_MIN_STACK"  # bytes, of a thread that Rust code starts
_NO_TOKEN: Final = 0


class FreeAccept:
    """For one thread."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, stack_bytes: int) -> None:
        """`stack_bytes`: of the thread that takes the tokens of all matchers. The first one decides."""
        self._executor = _executor(stack_bytes)
        self._failed = llguidance.LLMatcher(tokenizer, "", log_level=0)
        assert self._failed.is_error()

    def accept(self, matcher: llguidance.LLMatcher, token_id: int) -> None:
        """Does the work of `matcher.consume_token`."""
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
