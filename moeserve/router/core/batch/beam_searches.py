"""Beam searches between their clients' requests and the batch: the requests of one search come one by one, run as one,
and each gets an answer."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import GenerateRequest, TokensItem
from moeserve.messages.steps import Sampled
from moeserve.router.core.beams.beam_search import FoundAnswer
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.request import Request


class BeamSearches:
    """Gathers the requests of searches. A search that has all of them is one `Request` with the first one's id."""

    def __init__(self, memory: SequenceMemory, totals: LoadReport) -> None:
        self._memory = memory
        self._totals = totals
        self._gathering: dict[int, dict[int, GenerateRequest]] = {}  # by key, by choice
        self._searches: dict[int, int] = {}  # by the id of another choice: the id of its search's Request

    def request_id(self, choice_id: int) -> int:
        """The id of the Request that a client's request is part of, if it is open."""
        return self._searches.get(choice_id, choice_id)

    def gather(self, message: GenerateRequest) -> list[GenerateRequest]:
        """Returns all requests of the search if this one is the last of them; else an empty list."""
        assert message.beams is not None
        choices = self._gathering.setdefault(message.beams.key, {})
        choices[message.beams.choice] = message
        if len(choices) < message.beams.num_choices:
            return []
        del self._gathering[message.beams.key]
        return [choices[choice] for choice in sorted(choices)]

    def began(self, request: Request, messages: list[GenerateRequest]) -> None:
        assert request.beams is not None
        request.beams.choice_ids = tuple(message.id for message in messages)
        self._searches.update(dict.fromkeys(request.beams.choice_ids[1:], request.id))

    def ended(self, request: Request) -> None:
        for choice_id in request.answer_ids[1:]:
            del self._searches[choice_id]

    def forget(self, choice_id: int) -> None:
        """A client has disconnected. If its search still awaits requests, it is forgotten; else nothing happens."""
        for key, choices in self._gathering.items():
            left = {choice: message for choice, message in choices.items() if message.id != choice_id}
            if len(left) < len(choices):
                self._gathering[key] = left
                if not left:
                    del self._gathering[key]
                return

    def take_gathering(self) -> list[int]:
        """Returns the ids of all requests whose searches have not begun, and forgets them."""
        ids = [message.id for choices in self._gathering.values() for message in choices.values()]
        self._gathering.clear()
        return ids

    def advance(self, request: Request, sampled: Sequence[Sampled], now: float) -> list[TokensItem]:
        """Takes the results of a search's rows, each of which has a token. Returns the final message of each of its
        requests if the search is over; the caller then releases it."""
        tops = [entry.logprob for entry in sampled if entry.logprob is not None]
        totals = self._totals
        totals.beam_forks += self._memory.advance_beams(request, tops)
        totals.beam_rows += len(tops)
        request.first_token_at = request.first_token_at or now
        request.last_token_at = now
        request.num_output += 1
        if request.beams is None or request.beams.is_due:
            return []
        found = request.beams.search.answers()[: len(request.answer_ids)]
        totals.beam_searches += 1
        totals.generation_tokens += sum(answer.beam.length for answer in found)
        return [
            _item(choice_id, request, answer, now)
            for choice_id, answer in zip(request.answer_ids, found, strict=True)
        ]


def _item(choice_id: int, request: Request, answer: FoundAnswer, now: float) -> TokensItem:
    text = answer.text()
    return TokensItem(
        id=choice_id,
        token_ids=[one.token_id for one in text],
        logprobs=None if request.sampling.logprobs is None else text,
        finish_reason="length" if answer.stop_token is None else "stop",
        stop_token=answer.stop_token,
        usage=request.usage(answer.beam.length, now),
        cached_tokens=request.cached_tokens,
        score=answer.score,
    )
