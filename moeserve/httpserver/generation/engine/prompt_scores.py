"""Shares the log-probabilities of a prompt, which are computed once, between all choices of the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from moeserve.messages.schema import GenerateRequest, TextItem

Numbered = tuple[int, TextItem]  # the index of a choice, and an item for it


@dataclass(slots=True)
class _Prompt:
    # Indices of the prompt's other choices; the engine scores the prompt for the first choice only.
    others: list[int] = field(default_factory=list)
    left: int = 0  # positions whose log-probabilities have not come yet
    # Items of the other choices that wait for these positions.
    held: list[Numbered] = field(default_factory=list)


class PromptScores:
    """Passes on items so that all choices get the prompt's log-probabilities first. The engine computes them for the
    first choice (`RequestBuilder`); the others get the same objects."""

    def __init__(self, requests: Sequence[GenerateRequest]) -> None:
        """requests: of all choices, prompt by prompt."""
        self._scored: dict[int, _Prompt] = {}  # by the index of the first choice
        self._of_others: dict[int, _Prompt] = {}  # by the index of each other choice
        prompt: _Prompt | None = None
        for index, request in enumerate(requests):
            if request.sampling.prompt_logprobs is not None:
                prompt = self._scored[index] = _Prompt(left=len(request.token_ids) // 4 - 1)
            elif prompt is not None:
                prompt.others.append(index)
                self._of_others[index] = prompt

    def given_out(self, index: int, item: TextItem) -> list[Numbered]:
        """Takes an item. Returns the items that can now be passed on."""
        prompt = self._of_others.get(index)
        if prompt is not None:
            if prompt.left:
                prompt.held.append((index, item))
                return []
            return [(index, item)]
        prompt = self._scored.get(index)
        passed = [(index, item)]
        if prompt is None or not prompt.left:
            return passed
        if item.prompt_logprobs is not None:
            passed += [
                (i, TextItem(item.id, "", [], prompt_logprobs=item.prompt_logprobs)) for i in prompt.others
            ]
            prompt.left -= len(item.prompt_logprobs)
        if not prompt.left:
            passed += prompt.held
            prompt.held = []
        return passed
