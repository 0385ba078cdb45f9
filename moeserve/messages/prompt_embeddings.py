"""Positions of a prompt that are embeddings (of a picture, for example) instead of token ids.

The rows are in a file of the runtime directory (`processes/embedding_files.py`), which a message names. Caches identify
a span by the hash of its rows and positions, so spans of different content never share KV, whatever ids stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Final

import msgspec

MOST_SPANS: Final = 512  # of a prompt: a video of 768 frames has 384
MOST_BYTES: Final = 512 << 20  # of a prompt's rows
SECTIONS: Final = 3  # of a position: time, height, width
HASH_BYTES: Final = 32
_HANDLE_CHARACTERS: Final = frozenset("0123456789abcdef")
_MOST_HANDLE_CHARACTERS: Final = 64
_INT32_BYTES: Final = 4


class EmbeddingSpan(msgspec.Struct, frozen=True, array_like=True):
    """A prompt's positions start .. start + count - 1, whose inputs are given as embeddings. The ids that
    `GenerateRequest.token_ids` has there are placeholders; KV events show the span's first one at all positions."""

    start: int
    count: int
    sha256: bytes  # of the rows: float32 [count, hidden], little-endian, as the first layer reads them
    handle: str  # the file's name
    # int32 [3, count]: where rotation puts each row, in sections. Text behind it goes on at the largest of them plus 1.
    # Empty: like tokens.
    positions: bytes = b""

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def key(self) -> bytes:
        """The key of the span, 32 bytes: KV behind the span depends on it and on the model."""
        return sha256(self.sha256 + self.count.to_bytes(4, "little") + self.positions).digest()


def is_handle(text: str) -> bool:
    """Returns whether the name has the form of an embedding file's name; paths do not."""
    return 0 < len(text) <= _MOST_HANDLE_CHARACTERS and _HANDLE_CHARACTERS.issuperset(text)


def fault_of(
    spans: Sequence[EmbeddingSpan], num_prompt: int, row_bytes: int, max_position: int
) -> str | None:
    """Returns why a prompt cannot have these spans; None if it can. row_bytes: bytes of one embedding. max_position:
    RoPE has angles for the positions below it."""
    if len(spans) > MOST_SPANS:
        return f"a prompt has at most {MOST_SPANS} spans of embeddings, not {len(spans)}"
    end = 0
    for span in spans:
        if span.count < 1 or span.start < end or span.start > num_prompt - span.count:
            return (
                f"a span of {span.count} embeddings at position {span.start} does not fit: spans are sorted, do not "
                f"overlap, and lie within the {num_prompt} positions of the prompt"
            )
        end = span.end
        if len(span.sha256) != HASH_BYTES:
            return f"a span's sha256 has {HASH_BYTES} bytes, not {len(span.sha256)}"
        if not is_handle(span.handle):
            return f"a span's handle has 1 to {_MOST_HANDLE_CHARACTERS} hexadecimal digits"
        fault = _fault_of_positions(span, max_position)
        if fault is not None:
            return fault
    if (num_bytes := sum(span.count for span in spans) * row_bytes) > MOST_BYTES:
        return f"a prompt's embeddings have at most {MOST_BYTES} bytes, not {num_bytes}"
    return None


def _fault_of_positions(span: EmbeddingSpan, max_position: int) -> str | None:
    if not span.positions:
        return None
    expected = SECTIONS * span.count * _INT32_BYTES
    if len(span.positions) != expected:
        return f"a span's positions are int32 [{SECTIONS}, {span.count}]: {expected} bytes, not {len(span.positions)}"
    values = memoryview(span.positions).cast("i")
    if min(values) < 0 or max(values) >= max_position:
        return f"a span's positions are in the range 0 to {max_position - 1}"
    return None
