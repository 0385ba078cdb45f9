"""The requests of one beam search: they come one by one, run as one, and each gets an answer."""

from __future__ import annotations

from moeserve.messages.schema import GenerateRequest, TokensItem
from moeserve.router.core.beam_search import FoundAnswer
from moeserve.router.core.request import Request


class BeamChoices:
    """Gathers the requests of searches. A search that has all of them is one `Request` with the first one's id."""

    def __init__(self) -> None:
        self._gathering: dict[int, dict[int, GenerateRequest]] = {}  # by key, by choice
        self._searches: dict[int, int] = {}  # by id of a search's other choices: the id of its Request

    def request_id(self, choice_id: int) -> int:
        """The id of the Request that a client's request is part of, if it is open."""
        return self._searches.get(choice_id, choice_id)

    def gather(self, message: GenerateRequest) -> list[GenerateRequest]:
        """The requests of the search if this is the last one of them; else none."""
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
        """A client has gone. Nothing happens unless its search still awaits other requests, which will not come."""
        for key, choices in self._gathering.items():
            left = {choice: message for choice, message in choices.items() if message.id != choice_id}
            if len(left) < len(choices):
                self._gathering[key] = left
                if not left:
                    del self._gathering[key]
                return

    def take_gathering(self) -> list[int]:
        """The ids of all requests whose searches have not begun, which now never will."""
        ids = [message.id for choices in self._gathering.values() for message in choices.values()]
        self._gathering.clear()
        return ids


def answer_items(request: Request, now: float) -> list[TokensItem]:
    """The final message of each choice of a search that is over."""
    assert request.beams is not None
    found = request.beams.search.answers()
    return [
        _item(choice_id, request, answer, now)
        for choice_id, answer in zip(request.answer_ids, found, strict=False)
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
