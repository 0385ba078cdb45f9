"""Log-probabilities in the form of OpenAI's chat APIs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import orjson
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.messages.sampling import TokenLogprob
from moeserve.messages.schema import TextItem

# Tokens encoded at once. With 20 alternatives for each token this takes 1 ms, in which no other thread runs.
TOKENS_AT_ONCE: Final = 256
LOWEST = -9999.0  # vLLM's substitute for minus infinity, which JSON cannot express


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class RankedLogprob(TypedDict):
    logprob: float
    rank: int | None
    decoded_token: str


# vLLM's format: null for the first token; for every other token a dict by token id, of the token itself and the most
# likely ones.
PromptLogprobs = list[dict[str, RankedLogprob] | None]


def prompt_logprobs(text: ModelText, items: Sequence[TextItem], top: int) -> PromptLogprobs:
    """Returns the prompt's log-probabilities, from the items of one of its choices, as encoded JSON for a response.
    Call it on a thread: up to a million entries are encoded, a few at a time."""

    def ranked(token: TokenLogprob) -> dict[str, RankedLogprob]:
        pairs = [*zip(token.top_ids[:top], token.top_logprobs, strict=False)]
        found: dict[str, RankedLogprob] = {
            str(token_id): {
                "logprob": finite(value),
                "rank": rank,
                "decoded_token": text.token_text(token_id),
            }
            for rank, (token_id, value) in enumerate(pairs, 1)
        }
        own: RankedLogprob = {
            "logprob": finite(token.logprob),
            "rank": token.rank,
            "decoded_token": text.token_text(token.token_id),
        }
        return found | {str(token.token_id): own}

    tokens = [token for item in items for token in item.prompt_logprobs or ()]
    pieces = [b"null"]
    for first in range(0, len(tokens), TOKENS_AT_ONCE):
        pieces.append(orjson.dumps([ranked(token) for token in tokens[first : first + TOKENS_AT_ONCE]])[1:-1])
    return cast("PromptLogprobs", orjson.Fragment(b"[" + b",".join(pieces) + b"]"))


def chat_logprobs(
    text: ModelText, tokens: Sequence[TokenLogprob], top: int, as_ids: bool
) -> list[ChatLogprob]:
    """Returns one object for each token, with `top` alternatives. With `as_ids`, tokens are named "token_id:123"."""

    def entry(token_id: int, logprob: float) -> TopLogprob:
        return {
            "token": f"token_id:{token_id}" if as_ids else text.token_text(token_id),
            "logprob": finite(logprob),
            "bytes": list(text.token_bytes(token_id)),
        }

    return [
        {
            **entry(token.token_id, token.logprob),
            "top_logprobs": [
                entry(top_id, logprob)
                for top_id, logprob in zip(token.top_ids[:top], token.top_logprobs, strict=False)
            ],
        }
        for token in tokens
    ]


def encoded_chat_logprobs(
    text: ModelText, tokens: Sequence[TokenLogprob], top: int, as_ids: bool
) -> list[ChatLogprob]:
    """Returns `chat_logprobs` as encoded JSON for a response. Call it on a thread: up to a million entries are encoded,
    a few at a time."""
    pieces = [
        orjson.dumps(chat_logprobs(text, tokens[first : first + TOKENS_AT_ONCE], top, as_ids))[1:-1]
        for first in range(0, len(tokens), TOKENS_AT_ONCE)
    ]
    return cast("list[ChatLogprob]", orjson.Fragment(b"[" + b",".join(pieces) + b"]"))


def finite(logprob: float) -> float:
    """Returns the log-probability; LOWEST instead of minus infinity."""
    return max(logprob, LOWEST)
