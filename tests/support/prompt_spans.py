"""Prompts with spans of embeddings, for the router's tests."""

from __future__ import annotations

from hashlib import sha256

import msgspec

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.schema import GenerateRequest
from tests.support.router_world import World, final_item, request

PLACEHOLDER = 7
TEXT = list(range(100, 140))


def span(start: int, count: int, content: str = "cat", handle: str = "aa") -> EmbeddingSpan:
    return EmbeddingSpan(start, count, sha256(content.encode()).digest(), handle)


def ask(id: int, tokens: list[int], *spans: EmbeddingSpan, max_tokens: int = 4) -> GenerateRequest:
    ids = list(tokens)
    for one in spans:
        ids[one.start : one.end] = [PLACEHOLDER] * one.count
    return msgspec.structs.replace(request(id, ids, max_tokens), spans=list(spans))


def cached(world: World, id: int) -> int:
    usage = final_item(world, id).usage
    assert usage is not None
    return usage.cached_tokens
