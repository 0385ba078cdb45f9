"""Prompts with spans of embeddings, for the router's tests."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import sha256

import msgspec

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.schema import GenerateRequest
from tests.support.router.router_world import World, final_item, request

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


def live_on(world: World, rng: random.Random, id: int, spans: Sequence[EmbeddingSpan]) -> None:
    """Adds a request with these spans and runs some steps; now and then aborts a request or loses the worker."""
    world.add(ask(id, TEXT[: rng.randint(26, 40)], *spans, max_tokens=rng.randint(1, 8)))
    for _ in range(rng.randint(0, 3)):
        world.plan()
        world.result()
        world.check()
    if rng.random() < 0.1:
        world.abort(rng.randint(0, id))
    if rng.random() < 0.05:
        world.lose_worker()
        world.find_worker(crashed_by_itself=False)
