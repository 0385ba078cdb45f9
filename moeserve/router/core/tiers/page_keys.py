"""Keys of pages: a hash chain, so that a key identifies the page's tokens and all tokens before them."""

from __future__ import annotations

from hashlib import blake2b

from moeserve.messages.pages import PAGE_KEY_BYTES
from moeserve.router.core.memory.embedding_numbers import EmbeddingNumbers
from moeserve.router.core.memory.radix_node import TOKEN_BYTES, Namespace


def page_keys(
    namespace: Namespace, tokens: bytes, page_tokens: int, spans: EmbeddingNumbers | None = None
) -> list[bytes]:
    """Returns the keys of the complete pages of `tokens` (int32). The namespace (API key's name, salt, adapter)
    enters every key and cannot be recovered from it."""
    key = blake2b(repr(namespace).encode(), digest_size=PAGE_KEY_BYTES).digest()
    step = page_tokens * TOKEN_BYTES
    keys = []
    for start in range(0, len(tokens) - step + 1, step):
        page = tokens[start : start + step]
        key = blake2b(key + (spans.content(page) if spans else page), digest_size=PAGE_KEY_BYTES).digest()
        keys.append(key)
    return keys


def state_key(key: bytes) -> bytes:
    """Returns the key of the recurrent state after the tokens that a page's key identifies."""
    return blake2b(key, digest_size=PAGE_KEY_BYTES, person=b"state").digest()


def split_keys(keys: bytes) -> list[bytes]:
    """Splits the concatenated keys of a PageReport."""
    return [keys[at : at + PAGE_KEY_BYTES] for at in range(0, len(keys), PAGE_KEY_BYTES)]
