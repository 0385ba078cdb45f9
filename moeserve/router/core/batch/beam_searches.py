"""Combines the client requests of a beam search. Each choice of a search arrives as a request of its own; all of them
run as one `Request`, and each gets an answer."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.messages.router_metrics import LoadReport
from moeserve.messages.schema import GenerateRequest, TokensItem
from moeserve.messages.steps import Sampled
from moeserve.router.core.beams.beam_search import FoundAnswer
from moeserve.router.core.memory.sequence_memory import SequenceMemory
from moeserve.router.core.request import Request


class BeamSearches:
    """Collects the client requests of each search. A complete search is one `Request`, with the id of the first."""

    def __init__(self, memory: SequenceMemory, totals: LoadReport) -> None:
        self._memory = memory
        self._totals = totals
        self._gathering: dict[int, dict[int, GenerateRequest]] = {}  # search key → choice number → request
        self._searches: dict[int, int] = {}  # id of a further choice → id of its search's Request

    def request_id(self, choice_id: int) -> int:
        """Returns the id of the Request that serves a client's request, if it is open."""
        return self._searches.get(choice_id, choice_id)

    def gather(self, message: GenerateRequest) -> list[GenerateRequest]:
        """Adds a request. Returns all requests of its search once it is complete; else an empty list."""
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
        """Drops an incomplete search whose client has disconnected; ignores any other id."""
        for key, choices in self._gathering.items():
            left = {choice: message for choice, message in choices.items() if message.id != choice_id}
            if len(left) < len(choices):
                self._gathering[key] = left
                if not left:
                    del self._gathering[key]
                return

    def take_gathering(self) -> list[int]:
        """Returns the ids of all requests in incomplete searches, and drops these."""
        ids = [message.id for choices in self._gathering.values() for message in choices.values()]
        self._gathering.clear()
        return ids

    def advance(self, request: Request, sampled: Sequence[Sampled], now: float) -> list[TokensItem]:
        """Advances a search by the sampled tokens of all its rows. Returns an empty list while the search goes on; when
        it is over, the final message of each client request, and the caller then releases the Request. now: monotonic
        seconds."""
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
