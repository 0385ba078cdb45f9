"""`best_of`: for each prompt, `best_of` candidates are generated and the `n` with the highest mean log-probability per
token are returned, as OpenAI defines it. A token that ended the answer does not count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeserve.messages.schema import TextItem


def best_answers(
    candidates: Sequence[Sequence[TextItem]], per_prompt: int, n: int
) -> list[Sequence[TextItem]]:
    """Returns the best n candidates of each prompt, best first; equal candidates keep their order. candidates:
    `per_prompt` candidates for each prompt, prompt by prompt, with the log-probabilities of their tokens."""
    found: list[Sequence[TextItem]] = []
    for first in range(0, len(candidates), per_prompt):
        found += sorted(candidates[first : first + per_prompt], key=mean_logprob, reverse=True)[:n]
    return found


def mean_logprob(items: Sequence[TextItem]) -> float:
    """Returns the mean log-probability of a candidate's tokens; minus infinity for a candidate without tokens."""
    logprobs = [token.logprob for item in items for token in item.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
