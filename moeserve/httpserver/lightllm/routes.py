"""LightLLM's /generate and /generate_stream.

The shapes are those of LightLLM's `api_lightllm.py`; errors are OpenAI's here as everywhere.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.model_text import ModelText
from moeserve.httpserver.generation.request_builder import Wish
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.structured_output import constrain
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.httpserver.lightllm.bodies import GenerateRequestBody
from moeserve.httpserver.openai.objects import GenerateEvent, GenerateResponse, GenerateToken
from moeserve.httpserver.transport.body import documented, read_body
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.sse import EventStream, answer
from moeserve.messages.schema import GenerateRequest, TextItem

router = APIRouter(tags=["LightLLM"])


@router.post(
    "/generate",
    openapi_extra=documented(GenerateRequestBody),
    responses={200: {"model": GenerateResponse}},
)
async def generate(request: Request) -> Response:
    """Completes a prompt, LightLLM's way."""
    arrival = time.monotonic()
    body = await read_body(request, GenerateRequestBody)
    return await answer(request, GenerateWork(service_of(request), body, arrival).whole())


@router.post(
    "/generate_stream",
    openapi_extra=documented(GenerateRequestBody),
    responses={200: {"model": GenerateEvent, "description": "One such event per token."}},
)
async def generate_stream(request: Request) -> Response:
    """Completes a prompt, LightLLM's way, token by token."""
    arrival = time.monotonic()
    body = await read_body(request, GenerateRequestBody)
    if body.parameters.n != 1:
        raise ApiError(400, "parameters.n: must be 1 for /generate_stream", param="parameters.n")
    return EventStream(GenerateWork(service_of(request), body, arrival).events(), end=b"")


@dataclass
class GenerateWork:
    service: Service
    body: GenerateRequestBody
    arrival: float

    async def whole(self) -> GenerateResponse:
        text, requests, tally = await self._prepare()
        answers = await self.service.engine.complete(requests)
        for index, items in enumerate(answers):
            tally.take(index, items[-1])
        counts = [items[-1].usage.completion_tokens for items in answers if items[-1].usage is not None]
        reasons = [items[-1].finish_reason for items in answers]
        one = len(requests) == 1
        response: GenerateResponse = {
            "generated_text": ["".join(item.text for item in items) for items in answers],
            "count_output_tokens": counts[0] if one else counts,
            "finish_reason": reasons[0] if one else reasons,
            "prompt_tokens": tally.usage()["prompt_tokens"],
            "timings": tally.timings(),
        }
        if self.body.parameters.return_details:
            tokens = [[token for item in items for token in _tokens(text, item)] for items in answers]
            response["tokens"] = tokens[0] if one else tokens
        return response

    async def events(self) -> AsyncGenerator[GenerateEvent, None]:
        """Each token is one event; text that was held back comes with the token that let it go."""
        text, requests, tally = await self._prepare()
        prompt_tokens = tally.usage()["prompt_tokens"]
        count = 0
        async with self.service.engine.start(requests) as batch:
            async for _, item in batch:
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

    async def _prepare(self) -> tuple[ModelText, list[GenerateRequest], UsageTally]:
        """Everything that may refuse the request. Raises ApiError."""
        parameters = self.body.parameters
        text, limit = self.service.ready(None)
        (prompt,) = await text.encode([self.body.inputs], limit=limit, param="inputs")
        wish = Wish(
            sampling=parameters.sampling(),
            text=parameters.text_options(),
            arrival=self.arrival,
            max_tokens=parameters.max_new_tokens,
            n=parameters.n,
            seed=parameters.seed,
            ignore_eos=parameters.ignore_eos,
            prompt_param="inputs",
            max_tokens_param="parameters.max_new_tokens",
            stop_param="parameters.stop_sequences",
        )
        if (constraint := parameters.constraint()) is not None:
            wish = await constrain(self.service.grammars, wish, constraint)
        requests = self.service.admission.requests(text, [prompt], wish)
        return text, requests, UsageTally([len(prompt)], parameters.n)


def _tokens(text: ModelText, item: TextItem) -> list[GenerateToken]:
    """The item's tokens; its text goes with the last of them."""
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
    """For an item without a token of its own: the end by a stop token, or text that was held back."""
    stop_token = item.stop_reason if isinstance(item.stop_reason, int) else None
    return {"id": stop_token, "text": item.text, "logprob": None, "special": stop_token is not None}
