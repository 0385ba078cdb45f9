"""Matchers, which tell the tokens that may come next in an answer: llguidance's, over the GGUF's vocabulary.

All of llguidance's limits are set here for both the checker and the worker, so the worker can compile every grammar
that passed the checker. Their cost at most (llguidance's figures): per step 200,000 units of lexer fuel (14 ms) and
50,000 Earley items (2.5 ms); per matcher 10,000 lexer states of 2 kB.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import llguidance
import numpy as np
from numpy.typing import NDArray

from moeserve.tokenizer.text_tokenizer import TextTokenizer

from .errors import GrammarError
from .free_accept import FreeAccept

Bits = NDArray[np.int32]
MAX_MESSAGE_CHARS: Final = 600

_LIMITS: Final = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=10_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
# llguidance's compiler (1.9.1) recurses without a limit: a chain of 2,700 rules overflows a stack of 8 MB and ends the
# process. The checker's stack is small and the worker's large, so no grammar that passed the checker can end the
# worker.
CHECK_STACK_BYTES: Final = 2 << 20
STACK_BYTES: Final = 16 << 20
FORCED_BYTES: Final = 128  # longest forced text; drafts are shorter
# If a matcher's last token took this much CPU time, the next one is accepted without the GIL. That wakes another
# thread, which may be slower on a busy machine. Tokens of JSON take about 20 us.
COSTLY_TOKEN_S: Final = 0.0005

_SILENT: Final = 0
_NOT_TEXT: Final = b"\xff"  # llguidance's prefix for tokens that are not text


class GrammarEngine:
    """The vocabulary in llguidance's form (151,936 tokens: 0.5 s to build, 70 MB). One thread may compile; any thread
    may use a compiled grammar.

    It caches nothing: the worker keeps compiled grammars (`GrammarCompiler`), httpserver the accepted specs
    (`GrammarChecker`).
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        self.eos_ids = vocabulary.eos_ids
        self.words = (vocabulary.size + 31) // 32  # length of a mask in int32s
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos_ids),
        )

    def matcher(self, grammar: str) -> Matcher:
        """Returns a matcher at the grammar's start. Raises GrammarError for a grammar that is not valid, not supported
        or too complex."""
        return self.compile(grammar).matcher()

    def compile(self, grammar: str) -> CompiledGrammar:
        """Compiles a grammar. Raises GrammarError for a grammar that is not valid, not supported or too complex."""
        with panics_as_errors():
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=_SILENT, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_shortened(matcher.get_error()))
        return CompiledGrammar(matcher, self.eos_ids, self._tokenizer)


class CompiledGrammar:
    """An immutable compiled grammar, for any thread. Making a matcher copies it (20 us; compiling 100 tools takes 77
    ms): agents send the same grammar with every request, and all choices of a request use it."""

    def __init__(
        self, matcher: llguidance.LLMatcher, eos_ids: tuple[int, ...], tokenizer: llguidance.LLTokenizer
    ) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._tokenizer = tokenizer

    def matcher(self) -> Matcher:
        """Returns a matcher at the grammar's start."""
        return Matcher(self._matcher.deep_copy(), self._eos_ids, self._tokenizer)


class _Vocabulary:
    """The tokenizer for llguidance.TokenizerWrapper. With it, text that the grammar dictates is written in the tokens
    that the model has learnt, not in others with the same spelling."""

    bos_token_id = None
    special_token_ids: tuple[int, ...] = ()

    def __init__(self, tokenizer: TextTokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        self._tokenizer = tokenizer
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens = list(vocabulary.token_bytes)
        for token_id in vocabulary.special | vocabulary.unused:
            self.tokens[token_id] = _NOT_TEXT + self.tokens[token_id]

    def __call__(self, text: Any) -> list[int]:
        """Tokenizes UTF-8 bytes. llguidance passes whole characters only; the text may be as long as the grammar."""
        return self._tokenizer.encode_rest(bytes(text).decode("utf-8"), parse_special=False)


class Matcher:
    """The position of one answer in its grammar. The grammar ends with an end-of-sequence token. Long work runs without
    the GIL."""

    def __init__(
        self, matcher: llguidance.LLMatcher, eos_ids: tuple[int, ...], tokenizer: llguidance.LLTokenizer
    ) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._tokenizer = tokenizer
        self._free: FreeAccept | None = None  # set after the first costly token
        self._token_s = 0.0  # CPU time of the last token
        self._mask_s = math.inf  # CPU time of the mask after it
        self.elsewhere_s = 0.0  # estimated CPU time of another thread, which cannot be read

    def fill(self, mask: Bits) -> None:
        """Sets the bits of the tokens that may come next; at the grammar's end, the bits of the end-of-sequence tokens.
        mask: int32 [words], lowest bit first. Raises GrammarError if it exceeds the limits."""
        started = time.thread_time()
        with panics_as_errors():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._mask_s = time.thread_time() - started
        self._check()

    def forced(self) -> tuple[int, ...]:
        """Returns the tokens of the text that must come next, in the model's usual tokenization; the model may still
        write the same text in other tokens."""
        if self._matcher.is_stopped():
            return ()
        try:
            with panics_as_errors():
                text = bytes(self._matcher.compute_ff_bytes())[:FORCED_BYTES]
                return tuple(self._tokenizer.tokenize_bytes(text)) if text else ()
        except GrammarError:  # the answer continues without these drafts
            return ()

    def accept(self, token_id: int) -> None:
        """Advances by a token. Raises GrammarError if the token is not allowed."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            if token_id not in self._eos_ids:
                raise GrammarError(f"token {token_id} came after the end of the grammar")
            return
        with panics_as_errors():
            if self._token_s < COSTLY_TOKEN_S:
                started = time.thread_time()
                self._matcher.consume_token(token_id)
                self._token_s = time.thread_time() - started
            else:
                self._accept_freely(token_id)
        self._mask_s = math.inf
        self._check()

    def _accept_freely(self, token_id: int) -> None:
        if self._free is None:
            self._free = FreeAccept(self._tokenizer, STACK_BYTES)
        started = time.monotonic()
        self._free.accept(self._matcher, token_id)
        # Wall time exceeds CPU time on a busy machine. The previous mask included this token's work, so its time is an
        # upper bound.
        self._token_s = min(time.monotonic() - started, self._mask_s)
        self.elsewhere_s += self._token_s

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_shortened(self._matcher.get_error()))


class _PanicsAsErrors:
    """A context manager. One instance is reused, because it is entered twice per token."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A panic of Rust code (PyO3's PanicException) is not an Exception, and its class cannot be imported.
        if kind is not None and kind.__name__ == "PanicException":
            raise GrammarError(_shortened(f"llguidance failed: {error}")) from error


_PANICS_AS_ERRORS: Final = _PanicsAsErrors()


def panics_as_errors() -> _PanicsAsErrors:
    """Returns a context manager that turns a panic of llguidance within its block into a GrammarError, which ends one
    request instead of the process."""
    return _PANICS_AS_ERRORS


@contextmanager
def threads_with_stack(size: int) -> Iterator[None]:
    """Gives threads that start within the `with` block a stack of `size` bytes."""
    before = threading.stack_size(size)
    try:
        yield
    finally:
        threading.stack_size(before)


def set_bits(mask: Bits, token_ids: tuple[int, ...]) -> None:
    unsigned = mask.view(np.uint32)
    for token_id in token_ids:
        unsigned[token_id // 32] |= np.uint32(1 << token_id % 32)


def clear_bits(mask: Bits, token_ids: tuple[int, ...]) -> None:
    unsigned = mask.view(np.uint32)
    for token_id in token_ids:
        unsigned[token_id // 32] &= ~np.uint32(1 << token_id % 32)


def _shortened(message: str) -> str:
    """Returns the message's first paragraph. The rest is llguidance's state and our generated grammar."""
    text = message.partition("\n<state>")[0].removesuffix("<non-verbose/>").strip()
    if text == "NoExtensionBias":  # llguidance's error if no token can come first, as with {"$ref": "#"}
        text = "no text fits it; does a $ref or a rule lead to nothing but itself?"
    if "too many expressions constructed" in text:  # llguidance's error for a large combination of patterns
        text += "; lower its repetitions and bounds of lengths ({m,n}, minLength, maxLength), or shorten its patterns"
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."
