"""/generate and /generate_stream.

Source: LightLLM's `api_lightllm.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.beside_streams import beside_streams, values_of
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.prepare import prepare
from moeserve.httpserver.generation.prepared import PreparedRequest
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.lightllm.bodies import GenerateRequestBody
from moeserve.httpserver.lightllm.objects import GenerateEvent, GenerateResponse, GenerateToken
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import EventStream, answer
from moeserve.messages.schema import TextItem

router = APIRouter(tags=["LightLLM"], route_class=DocumentedRoute)


@router.post(
    "/generate",
    openapi_extra=documented(
        GenerateRequestBody, {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32}}
    ),
    responses={200: {"model": GenerateResponse}},
)
async def generate(request: Request) -> Response:
    """Completes a prompt in LightLLM's format."""
    caller = caller_of(request)
    body = await read_body(request, GenerateRequestBody)
    return await answer(request, GenerateHandler(service_of(request), body, caller).whole())


@router.post(
    "/generate_stream",
    openapi_extra=documented(
        GenerateRequestBody,
        {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 32}},
        stream=GenerateEvent,
    ),
    responses={200: {"description": "One such event per token."}},
    response_class=Response,
)
async def generate_stream(request: Request) -> Response:
    """Completes a prompt in LightLLM's format, as a stream of tokens."""
    caller = caller_of(request)
    body = await read_body(request, GenerateRequestBody)
    if body.parameters.n != 1:
        raise ApiError(400, "parameters.n: must be 1 for /generate_stream", param="parameters.n")
    return EventStream(GenerateHandler(service_of(request), body, caller).events(), end=b"")


@dataclass
class GenerateHandler:
    service: Service
    body: GenerateRequestBody
    caller: Caller

    async def whole(self) -> GenerateResponse:
        prepared = await self._prepare()
        text, tally = prepared.text, prepared.tally
        answers = await prepared.complete()
        for index, items in enumerate(answers):
            tally.take(index, items[-1])
        counts = [items[-1].usage.completion_tokens for items in answers if items[-1].usage is not None]
        reasons = [items[-1].finish_reason for items in answers]
        one = len(prepared.requests) == 1
        response: GenerateResponse = {
            "generated_text": ["".join(item.text for item in items) for items in answers],
            "count_output_tokens": counts[0] if one else counts,
            "finish_reason": reasons[0] if one else reasons,
            "prompt_tokens": tally.usage()["prompt_tokens"],
            "timings": tally.timings(),
        }
        if self.body.parameters.return_details:
            tokens = await beside_streams(values_of(answers), _all_tokens, text, answers)
            response["tokens"] = tokens[0] if one else tokens
        return response

    async def events(self) -> AsyncGenerator[GenerateEvent, None]:
        """Yields one event per token. Text that was held back is sent with the token that releases it."""
        prepared = await self._prepare()
        text, tally = prepared.text, prepared.tally
        prompt_tokens = tally.usage()["prompt_tokens"]
        count = 0
        async with prepared.stream() as stream:
            async for _, item in stream:
                tally.take(0, item)
                tokens = _tokens(text, item)
                if not tokens and (item.text or item.finish_reason is not None):
                    tokens = [_without_token(item)]
                for place, token in enumerate(tokens, 1):
                    count += token["id"] is not None
                    token |= {"count_output_tokens": count, "prompt_tokens": prompt_tokens}
                    finished = place == len(tokens) and item.finish_reason is not None
                    yield {
                        "token": token,
                        "generated_text": None,
                        "finished": finished,
                        "finish_reason": item.finish_reason if finished else None,
                        "details": tally.timings() if finished else None,
                    }

    async def _prepare(self) -> PreparedRequest:
        """Raises ApiError."""
        return await prepare(self.service, self.body.asked(self.caller))


def _all_tokens(text: ModelText, answers: list[list[TextItem]]) -> list[list[GenerateToken]]:
    return [[token for item in items for token in _tokens(text, item)] for items in answers]


def _tokens(text: ModelText, item: TextItem) -> list[GenerateToken]:
    """Returns the item's tokens; the last of them has the item's text."""
    logprobs = item.logprobs or []
    tokens: list[GenerateToken] = [
        {
            "id": token_id,
            "text": "",
            "logprob": logprobs[place].logprob if place < len(logprobs) else None,
            "special": text.is_special(token_id),
        }
        for place, token_id in enumerate(item.token_ids)
    ]
    if tokens:
        tokens[-1]["text"] = item.text
    return tokens


def _without_token(item: TextItem) -> GenerateToken:
    """Returns a placeholder token for an item without tokens: the item is the end by a stop token, or text that was
    held back."""
    stop_token = item.stop_reason if isinstance(item.stop_reason, int) else None
    return {"id": stop_token, "text": item.text, "logprob": None, "special": stop_token is not None}
