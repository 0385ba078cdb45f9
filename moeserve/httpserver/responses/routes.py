"""OpenAI's /v1/responses: stateless, or stored and gone on from with previous_response_id."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Final

from fastapi import APIRouter, Request, Response

from moeserve.chatformat.events import Event, Text
from moeserve.httpserver.generation.answers import Answer
from moeserve.httpserver.generation.conversation import Conversation, Plan, plan, prompt_of
from moeserve.httpserver.generation.logprobs import chat_logprobs
from moeserve.httpserver.generation.request_builder import Wish
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.httpserver.openai.objects import ChatLogprob
from moeserve.httpserver.responses.bodies import (
    InputTokensRequest,
    ResponsesRequest,
    messages_of,
    stored_items,
)
from moeserve.httpserver.responses.objects import (
    DeletedResponse,
    InputItemList,
    InputTokens,
    OutputItem,
    ResponseEvent,
    ResponseObject,
)
from moeserve.httpserver.responses.store import Stored
from moeserve.httpserver.responses.writer import ItemWriter, new_id, output_of
from moeserve.httpserver.transport.body import documented, read_body
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.httpserver.transport.keys import key_owner
from moeserve.httpserver.transport.sse import EventStream, JsonResponse, answer
from moeserve.messages.schema import SamplingParams, TextItem, TextOptions

router = APIRouter(tags=["OpenAI"])

_MAX_LISTED: Final = 100


@router.post(
    "/v1/responses",
    openapi_extra=documented(ResponsesRequest),
    responses={200: {"model": ResponseObject, "description": "With stream true: response.* events."}},
)
async def create_response(request: Request) -> Response:
    """Answers a text or a list of items."""
    arrival = time.monotonic()
    body = await read_body(request, ResponsesRequest)
    work = ResponsesWork(service_of(request), body, new_id("resp"), arrival)
    if body.stream:
        return EventStream(work.events(), end=b"", named=True)
    return await answer(request, work.whole())


@router.post(
    "/v1/responses/input_tokens",
    openapi_extra=documented(InputTokensRequest),
    responses={200: {"model": InputTokens}},
)
async def count_input_tokens(request: Request) -> Response:
    """How many tokens a response's prompt would have."""
    body = await read_body(request, InputTokensRequest)
    return await answer(request, _count(service_of(request), body))


@router.get("/v1/responses/{response_id}", responses={200: {"model": ResponseObject}})
async def get_response(request: Request, response_id: str) -> Response:
    """A stored response."""
    _refuse_queries(request)
    return JsonResponse((await service_of(request).responses.get(key_owner.get(), response_id)).response)


@router.delete("/v1/responses/{response_id}", responses={200: {"model": DeletedResponse}})
async def delete_response(request: Request, response_id: str) -> Response:
    """Forgets a stored response."""
    _refuse_queries(request)
    await service_of(request).responses.delete(key_owner.get(), response_id)
    deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    return JsonResponse(deleted)


@router.get("/v1/responses/{response_id}/input_items", responses={200: {"model": InputItemList}})
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that a stored response was asked with."""
    limit, order, after = _page(request)
    items = (await service_of(request).responses.get(key_owner.get(), response_id)).input
    if order == "desc":
        items = items[::-1]
    ids = [item["id"] for item in items]
    if after is not None:
        if after not in ids:
            raise invalid("after", f"there is no item {after[:200]!r}")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    listed: InputItemList = {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(items) > limit,
    }
    return JsonResponse(listed)


def _refuse_queries(request: Request, *known: str) -> None:
    for name in request.query_params:
        if name not in known:
            raise ApiError(400, f"{name[:200]}: there is no such query parameter", code="unknown_parameter")


def _page(request: Request) -> tuple[int, str, str | None]:
    query = request.query_params
    _refuse_queries(request, "limit", "order", "after")
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= _MAX_LISTED):
        raise invalid("limit", f"must be in the range 1 to {_MAX_LISTED}, got {limit[:80]!r}")
    if order not in ("asc", "desc"):
        raise invalid("order", f"must be asc or desc, got {order[:80]!r}")
    return int(limit), order, query.get("after")


async def _count(service: Service, body: InputTokensRequest) -> InputTokens:
    text, limit = service.ready(body.model)
    wish = Wish(SamplingParams(max_tokens=0), TextOptions(), 0.0, None, prompt_param="input")
    chat = await _conversation(service, body, wish)
    return {"object": "response.input_tokens", "input_tokens": len(await prompt_of(text, limit, chat))}


async def _conversation(service: Service, body: InputTokensRequest, wish: Wish) -> Conversation:
    items: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        for stored in await service.responses.chain(key_owner.get(), body.previous_response_id):
            items += [*stored.input, *stored.response["output"]]
    return Conversation(
        model=body.model,
        messages=messages_of(body.instructions, [*stored_items(items), *body.input]),
        wish=wish,
        tools=body.tool_use(),
        thought=body.thought(),
        constraint=body.constraint(),
    )


@dataclass
class ResponsesWork:
    service: Service
    body: ResponsesRequest
    id: str
    arrival: float

    def __post_init__(self) -> None:
        self.created = int(time.time())
        self._wants_logprobs = "message.output_text.logprobs" in self.body.include
        self._encrypt = "reasoning.encrypted_content" in self.body.include

    async def whole(self) -> ResponseObject:
        planned = await self._plan()
        (items,) = await self.service.engine.complete(planned.requests)
        (reader,) = planned.readers
        logprobs: list[ChatLogprob] = []
        events: list[Event] = []
        for item in items:
            read = reader.read(item)
            events += read
            if any(isinstance(event, Text) for event in read):
                logprobs += self._logprobs_of(planned, item)
        found = Answer.of(events)
        planned.tally.take(0, items[-1], reader.reasoning_tokens)
        is_cut = items[-1].finish_reason == "length"
        output = output_of(found, logprobs, encrypt=self._encrypt, is_cut=is_cut)
        response = self._finished(output, planned.tally, is_cut)
        await self._store(response)
        return response

    async def events(self) -> AsyncGenerator[ResponseEvent, None]:
        planned = await self._plan()
        writer = ItemWriter(encrypt=self._encrypt)
        begun = False
        try:
            async with self.service.engine.start(planned.requests) as batch:
                async for _, item in batch:
                    if not begun:
                        begun = True
                        for name in ("response.created", "response.in_progress"):
                            yield writer.event(name, response=self._response([]))
                    for event in self._written(writer, planned, item):
                        yield event
                    if item.finish_reason is None:
                        continue
                    is_cut = item.finish_reason == "length"
                    for event in writer.close("incomplete" if is_cut else "completed"):
                        yield event
                    response = self._finished(writer.output, planned.tally, is_cut)
                    await self._store(response)
                    yield writer.event(f"response.{response['status']}", response=response)
        except ApiError as error:
            if not begun:
                raise
            for event in writer.close("incomplete"):
                yield event
            response = self._response(writer.output)
            response["status"] = "failed"
            code = "server_error" if error.status >= 500 else "invalid_prompt"
            response["error"] = {"code": code, "message": error.message}  # type: ignore[typeddict-item]
            yield writer.event("response.failed", response=response)

    def _written(self, writer: ItemWriter, planned: Plan, item: TextItem) -> list[ResponseEvent]:
        (reader,) = planned.readers
        logprobs = self._logprobs_of(planned, item)
        written: list[ResponseEvent] = []
        for event in reader.read(item):
            written += writer.write(event, logprobs)
            if isinstance(event, Text):
                logprobs = []
        planned.tally.take(0, item, reader.reasoning_tokens)
        return written

    async def _plan(self) -> Plan:
        body = self.body
        sampling = SamplingParams(
            max_tokens=0,
            temperature=body.temperature,
            top_p=body.top_p,
            logprobs=body.top_logprobs if self._wants_logprobs else None,
        )
        wish = Wish(
            sampling=sampling,
            text=TextOptions(),
            arrival=self.arrival,
            max_tokens=body.max_output_tokens,
            cache_salt=body.cache_salt,
            prompt_param="input",
            max_tokens_param="max_output_tokens",
        )
        return await plan(self.service, await _conversation(self.service, body, wish))

    def _logprobs_of(self, planned: Plan, item: TextItem) -> list[ChatLogprob]:
        if not self._wants_logprobs or not item.logprobs:
            return []
        return chat_logprobs(planned.text, item.logprobs, self.body.top_logprobs, as_ids=False)

    async def _store(self, response: ResponseObject) -> None:
        if not self.body.store:
            return
        given = [item.model_dump(mode="json", exclude_none=True) for item in self.body.input]
        for item in given:
            item.setdefault("id", new_id("item"))
        previous = self.body.previous_response_id
        await self.service.responses.put(Stored(self.id, key_owner.get(), previous, given, dict(response)))

    def _finished(self, output: list[OutputItem], tally: UsageTally, is_cut: bool) -> ResponseObject:
        response = self._response(output)
        response["status"] = "incomplete" if is_cut else "completed"
        response["completed_at"] = None if is_cut else int(time.time())
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        usage = tally.usage()
        response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {
                "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
                "cache_write_tokens": 0,
            },
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        return response

    def _response(self, output: list[OutputItem]) -> ResponseObject:
        body = self.body
        choice = body.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata,
            "model": self.service.model_name,
            "output": output,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "service_tier": "default",
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": body.text.format.model_dump(mode="json", by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump(mode="json", exclude_none=True) for tool in body.tools],
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }
