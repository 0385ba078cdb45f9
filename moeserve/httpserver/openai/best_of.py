"""`best_of`: more candidates are generated for a prompt than are asked for, and those with the highest mean
log-probability a token are returned, as OpenAI defines it. A token that ended the answer does not count."""

from __future__ import annotations

import math
from collections.abc import Sequence

from moeserve.messages.schema import TextItem


def best_answers(
    candidates: Sequence[Sequence[TextItem]], per_prompt: int, n: int
) -> list[Sequence[TextItem]]:
    """Returns the best n candidates of each prompt, best first; of equal ones, the first. candidates: `per_prompt` for
    each prompt, prompt by prompt, with their tokens' log-probabilities."""
    found: list[Sequence[TextItem]] = []
    for first in range(0, len(candidates), per_prompt):
        found += sorted(candidates[first : first + per_prompt], key=mean_logprob, reverse=True)[:n]
    return found


def mean_logprob(items: Sequence[TextItem]) -> float:
    """The mean log-probability of a candidate's tokens; for a candidate without tokens, less than any other's."""
    logprobs = [token.logprob for item in items for token in item.logprobs or ()]
    return sum(logprobs) / len(logprobs) if logprobs else -math.inf
