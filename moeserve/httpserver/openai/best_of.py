"""`best_of`: of more candidates for a prompt than are asked for, those of which the model is surest.

As OpenAI defines it, by the log-probability a token. A token that ended the answer is no part of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeserve.messages.schema import TextItem


def best_answers(
    candidates: Sequence[Sequence[TextItem]], per_prompt: int, n: int
) -> list[Sequence[TextItem]]:
    """The best n candidates of each prompt, best first, of equal ones the first. candidates: `per_prompt` of each,
    prompt by prompt, with their tokens' log-probabilities."""
    found: list[Sequence[TextItem]] = []
    for first in range(0, len(candidates), per_prompt):
        found += sorted(candidates[first : first + per_prompt], key=mean_logprob, reverse=True)[:n]
    return found


def mean_logprob(items: Sequence[TextItem]) -> float:
    """The mean log-probability of a candidate's tokens; for one without any, less than all others'."""
    logprobs = [token.logprob for item in items for token in item.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
