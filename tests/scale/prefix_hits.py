"""The share of prompts that replicas find in their caches."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from tests.e2e.completions import TEXT

POOL = 3600  # tokens of one replica's KV pool: five of the prefixes below and what is running
PREFIXES = 12  # of about 600 tokens
ROUNDS = 8


def chat(url: str, system: str, user: str, max_tokens: int = 4) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {
        "model": "m",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    response = httpx.post(url + "/v1/chat/completions", json=body, timeout=60)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def cached_share(url: str, run: str) -> float:
    """The share of prompt tokens that the caches had, over questions about PREFIXES documents in random order."""
    order = [prefix for prefix in range(PREFIXES) for _ in range(ROUNDS)]
    random.Random(0).shuffle(order)
    documents = [f"{run} {prefix}. " + TEXT * 30 for prefix in range(PREFIXES)]

    def ask(number: int) -> tuple[int, int]:
        usage = chat(url, documents[order[number]], f"Question {number}?")["usage"]
        return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    with ThreadPoolExecutor(3) as pool:
        counts = list(pool.map(ask, range(len(order))))
    return sum(cached for _, cached in counts) / sum(prompt for prompt, _ in counts)
