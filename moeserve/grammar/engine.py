"""Matchers: which tokens may come next in an answer. llguidance's, over the GGUF's own vocabulary.

Every limit that llguidance has is set here, once for the checker and the worker, so a grammar that passed the one
cannot surprise the other. What each costs at most (llguidance's own figures): a step 200,000 units of lexer fuel, 14
ms, and 50,000 Earley items, 2.5 ms; a matcher's lexer 10,000 states of 2 kB.
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
# llguidance's compiler recurses: a chain of 2,700 rules ends a process whose stack has 8 MB (1.9.1), and no limit of
# its own prevents that. The checker works on a small stack, the worker on a large one: what the checker survives cannot
# end the worker.
CHECK_STACK_BYTES: Final = 2 << 20
STACK_BYTES: Final = 16 << 20
FORCED_BYTES: Final = 128  # of a forced text: drafts are shorter
# CPU time of a matcher's last token, from which the next one is taken without the GIL. That wakes another thread, which
# may take longer on a busy machine; tokens of JSON take some 20 us.
COSTLY_TOKEN_S: Final = 0.0005

_SILENT: Final = 0
_NOT_TEXT: Final = b"\xff"  # llguidance's mark of a token that no text can be made of


class GrammarEngine:
    """The vocabulary in llguidance's form: for 151,936 tokens 0.5 s to build and 70 MB to keep. For one thread; what
    it has compiled may be used by another.

    It remembers nothing: the worker keeps what is compiled (`GrammarCompiler`), httpserver what has passed its check
    (`GrammarChecker`).
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        vocabulary = tokenizer.vocabulary
        self.eos_ids = vocabulary.eos_ids
        self.words = (vocabulary.size + 31) // 32  # int32s of a mask
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Vocabulary(tokenizer)),
            n_vocab=vocabulary.size,
            eos_token=list(vocabulary.eos_ids),
        )

    def matcher(self, grammar: str) -> Matcher:
        """At the grammar's start. Raises GrammarError."""
        return self.compile(grammar).matcher()

    def compile(self, grammar: str) -> CompiledGrammar:
        """Raises GrammarError."""
        with panics_as_errors():
            matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=_SILENT, limits=_LIMITS)
        if matcher.is_error():
            raise GrammarError(_shortened(matcher.get_error()))
        return CompiledGrammar(matcher, self.eos_ids, self._tokenizer)


class CompiledGrammar:
    """For any thread: it does not change. A matcher is a copy (20 us, against 77 ms to compile 100 tools): agents send
    their grammars with every request, and the choices of one request share it."""

    def __init__(
        self, matcher: llguidance.LLMatcher, eos_ids: tuple[int, ...], tokenizer: llguidance.LLTokenizer
    ) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._tokenizer = tokenizer

    def matcher(self) -> Matcher:
        """At the grammar's start."""
        return Matcher(self._matcher.deep_copy(), self._eos_ids, self._tokenizer)


class _Vocabulary:
    """The tokenizer that llguidance.TokenizerWrapper asks. A text that the grammar leaves no choice about is written in
    the tokens that the model has learnt, not in others that spell the same."""

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
        """`text` is UTF-8, of which llguidance passes whole characters only; up to all that a grammar holds."""
        return self._tokenizer.encode_rest(bytes(text).decode("utf-8"), parse_special=False)


class Matcher:
    """One answer on its way through its grammar. The end of the grammar is an end-of-sequence token. What takes long
    is done without the GIL."""

    def __init__(
        self, matcher: llguidance.LLMatcher, eos_ids: tuple[int, ...], tokenizer: llguidance.LLTokenizer
    ) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._tokenizer = tokenizer
        self._free: FreeAccept | None = None  # where it was costly once
        self._token_s = 0.0  # CPU time of the last token
        self._mask_s = math.inf  # of the mask behind it
        self.elsewhere_s = 0.0  # CPU time that another thread has spent, about: it cannot be read

    def fill(self, mask: Bits) -> None:
        """Sets the bits of the tokens that may come next: int32 [words], the lowest bit first; at the grammar's end
        those of the end-of-sequence tokens. GrammarError when that takes more than the limits allow."""
        started = time.thread_time()
        with panics_as_errors():
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._mask_s = time.thread_time() - started
        self._check()

    def forced(self) -> tuple[int, ...]:
        """Tokens of the text that must come next, as far as it is known. They spell it as the model has learnt to;
        others may come that spell it otherwise."""
        if self._matcher.is_stopped():
            return ()
        try:
            with panics_as_errors():
                text = bytes(self._matcher.compute_ff_bytes())[:FORCED_BYTES]
                return tuple(self._tokenizer.tokenize_bytes(text)) if text else ()
        except GrammarError:  # the answer goes on without this guess
            return ()

    def accept(self, token_id: int) -> None:
        """Takes the token that came. GrammarError for one that may not come."""
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
        # By the clock it takes longer where the machine is busy. It does again what the mask before it did for this
        # token among others, so it costs no more than that.
        self._token_s = min(time.monotonic() - started, self._mask_s)
        self.elsewhere_s += self._token_s

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(_shortened(self._matcher.get_error()))


class _PanicsAsErrors:
    """A context manager that is reused: it is entered twice for each token."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # A panic of Rust code is no Exception, and its class cannot be imported (PyO3's PanicException).
        if kind is not None and kind.__name__ == "PanicException":
            raise GrammarError(_shortened(f"llguidance failed: {error}")) from error


_PANICS_AS_ERRORS: Final = _PanicsAsErrors()


def panics_as_errors() -> _PanicsAsErrors:
    """A panic of llguidance inside of the `with` is a GrammarError: it ends one request and not the process."""
    return _PANICS_AS_ERRORS


@contextmanager
def threads_with_stack(size: int) -> Iterator[None]:
    """Threads that are started meanwhile have a stack of `size` bytes."""
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
    """The first paragraph: what follows is llguidance's state and our grammar around the client's."""
    text = message.partition("\n<state>")[0].removesuffix("<non-verbose/>").strip()
    if text == "NoExtensionBias":  # its name for a start that no token can follow, as with {"$ref": "#"}
        text = "no text fits it; does a $ref or a rule lead to nothing but itself?"
    return text if len(text) <= MAX_MESSAGE_CHARS else text[:MAX_MESSAGE_CHARS] + "..."
