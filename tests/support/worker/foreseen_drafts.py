"""Requests, and a drafter that knows their answers, and makes mistakes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from moeserve.messages.sampling import SamplingParams
from moeserve.messages.schema import GenerateRequest
from moeserve.worker.drafts.drafter import Wanted
from moeserve.worker.sequences import Int32s, StepLayout
from tests.support.router.router_world import request
from tests.support.worker.served_answers import Answer

ANSWER = 40


class Foreseen:
    """A drafter that knows the answers, and makes mistakes."""

    def __init__(self, tokens: Int32s, answers: list[list[int]], right: float, seed: int = 7) -> None:
        """answers: prompt and answer of each. right: share of the drafted tokens that are."""
        self._tokens = tokens
        self._answers = answers
        self._right = right
        self._rng = random.Random(seed)

    def bind(self, slot: int, namespace: str) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def draft(self, wanted: Sequence[Wanted]) -> list[Int32s]:
        return [self._draft(*one) for one in wanted]

    def computed(self, layout: StepLayout, accepted: Int32s) -> None:
        pass

    def _draft(self, slot: int, length: int, most: int) -> Int32s:
        return self.behind(self._tokens[slot, :length].tolist(), most)

    def behind(self, so_far: list[int], most: int) -> Int32s:
        """Up to `most` drafts behind a text."""
        length = len(so_far)
        text = next((text for text in self._answers if text[:length] == so_far), so_far)
        draft = text[length : length + self._rng.randint(0, most)]
        wrong = [token if self._rng.random() < self._right else 5 for token in draft]
        return np.array(wrong, np.int32)


def asked(
    count: int, vocab: int, *, temperature: float = 0.0, length: int = 48, **sampling: Any
) -> list[GenerateRequest]:
    """Prompts that repeat themselves; each other one shares a beginning with the one before."""
    rng = random.Random(3)
    messages = []
    for id in range(count):
        phrase = [rng.randrange(3, vocab) for _ in range(12)]
        prompt = (phrase * 8)[: length - 4] + [rng.randrange(3, vocab) for _ in range(4)]
        message = request(id, prompt, ANSWER)
        params = SamplingParams(
            **({"max_tokens": ANSWER, "temperature": temperature, "seed": id, "logprobs": 2} | sampling)
        )
        messages.append(msgspec.structs.replace(message, sampling=params))
    return messages


def whole_texts(requests: list[GenerateRequest], answers: dict[int, Answer]) -> list[list[int]]:
    return [np.frombuffer(one.token_ids, np.int32).tolist() + answers[one.id].tokens for one in requests]
