"""The routes of /v1/responses: stateless, or stored and continued with previous_response_id."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Final

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.prepare import count_prompt_tokens
from moeserve.httpserver.generation.request.caller import Caller, caller_of
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.responses.background import BackgroundResponses
from moeserve.httpserver.responses.bodies import InputTokensRequest, ResponsesRequest
from moeserve.httpserver.responses.handler import ResponsesHandler, conversation_of, error_event
from moeserve.httpserver.responses.kept_events import not_kept
from moeserve.httpserver.responses.objects import (
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseEvent,
    ResponseObject,
)
from moeserve.httpserver.responses.store import ResponseStore
from moeserve.httpserver.responses.writer import new_id
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import EventStream, JsonResponse, answer

API_NAME: Final = "responses"
# A header with the response's id. The front, which passes answers on, learns from it that a response continues after
# its request.
BACKGROUND_HEADER: Final = "x-moeserve-background-response"

RESPONSES: Final = "/v1/responses"

router = APIRouter(tags=["OpenAI"], route_class=DocumentedRoute)

_MAX_LISTED: Final = 100


@dataclass
class ResponsesState:
    store: ResponseStore
    background: BackgroundResponses

    def close(self) -> None:
        self.store.close()


@router.post(
    "/v1/responses",
    openapi_extra=documented(
        ResponsesRequest, {"input": "Hello", "max_output_tokens": 256}, stream=ResponseEvent
    ),
    responses={200: {"model": ResponseObject, "description": "With stream true: response.* events."}},
)
async def create_response(request: Request) -> Response:
    """Answers a text or a list of items."""
    caller = caller_of(request)
    body = await read_body(request, ResponsesRequest)
    service = service_of(request)
    handler = ResponsesHandler(service, _store(service), body, new_id("resp"), caller)
    if body.background:
        return await _in_background(service, handler)
    if body.stream:
        return _event_stream(handler.events())
    return await answer(request, handler.whole())


@router.post(
    "/v1/responses/input_tokens",
    openapi_extra=documented(InputTokensRequest, {"input": "Hello"}),
    responses={200: {"model": InputTokens}},
)
async def count_input_tokens(request: Request) -> Response:
    """Returns the number of tokens that a response's prompt would have."""
    caller = caller_of(request)
    body = await read_body(request, InputTokensRequest)
    return await answer(request, _count(service_of(request), body, caller))


@router.get(
    "/v1/responses/{response_id}",
    responses={200: {"model": ResponseObject, "description": "With stream true: response.* events."}},
)
async def get_response(request: Request, response_id: str) -> Response:
    """A response that is stored or made in the background. For a background response, `stream=true` sends the events
    after `starting_after`, including future events."""
    _refuse_queries(request, "stream", "starting_after", "include", "include[]", "include_obfuscation")
    state, owner = _state(service_of(request)), caller_of(request).key_owner
    run = state.background.find(owner, response_id)
    if _streams(request):
        if run is None:
            await state.store.get(owner, response_id)  # raises ApiError if there is no such response
            raise not_kept()
        return _event_stream(run.events(_starting_after(request)))
    if run is not None:
        return JsonResponse(run.response)
    return JsonResponse((await state.store.get(owner, response_id)).response)


@router.post("/v1/responses/{response_id}/cancel", responses={200: {"model": ResponseObject}})
async def cancel_response(request: Request, response_id: str) -> Response:
    """Ends a response that is made in the background, and returns it. A response that has ended is not changed."""
    _refuse_queries(request)
    state, owner = _state(service_of(request)), caller_of(request).key_owner
    if (run := state.background.find(owner, response_id)) is not None:
        return JsonResponse(await state.background.cancel(run))
    response = (await state.store.get(owner, response_id)).response
    if not response.get("background"):
        raise invalid("response_id", "only background responses can be cancelled; close the connection")
    return JsonResponse(response)


@router.delete("/v1/responses/{response_id}", responses={200: {"model": DeletedResponse}})
async def delete_response(request: Request, response_id: str) -> Response:
    """Deletes a stored response. A response that is being made in the background ends first."""
    _refuse_queries(request)
    state, owner = _state(service_of(request)), caller_of(request).key_owner
    if (run := state.background.find(owner, response_id)) is not None:
        await state.background.forget(run)
    await state.store.delete(owner, response_id)
    deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
    return JsonResponse(deleted)


@router.get("/v1/responses/{response_id}/input_items", responses={200: {"model": InputItemList}})
async def list_input_items(request: Request, response_id: str) -> Response:
    """The input items of a stored response."""
    limit, order, after = _page(request)
    items = (await _store(service_of(request)).get(caller_of(request).key_owner, response_id)).input
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


async def _in_background(service: Service, handler: ResponsesHandler) -> Response:
    if handler.caller.is_background:
        raise invalid("background", "a batch is answered in the background as it is; leave it out")
    run = await _state(service).background.begin(handler)
    answer = _event_stream(run.events()) if handler.body.stream else JsonResponse(run.response)
    answer.headers[BACKGROUND_HEADER] = handler.id
    return answer


def _event_stream(events: AsyncGenerator[ResponseEvent, None]) -> EventStream:
    return EventStream(events, end=b"", named=True, error_body=error_event)


def _streams(request: Request) -> bool:
    value = request.query_params.get("stream", "false")
    if value not in ("true", "false"):
        raise invalid("stream", f"must be true or false, got {value[:80]!r}")
    return value == "true"


def _starting_after(request: Request) -> int:
    """Returns the query parameter `starting_after`; -1 without it."""
    value = request.query_params.get("starting_after")
    if value is None:
        return -1
    if not (value.isascii() and value.isdecimal() and len(value) < 10):
        raise invalid("starting_after", f"must be an event's sequence_number, got {value[:80]!r}")
    return int(value)


def _refuse_queries(request: Request, *known: str) -> None:
    for name in request.query_params:
        if name not in known:
            raise ApiError(
                400, f"{name[:200]}: there is no such query parameter; leave it out", code="unknown_parameter"
            )


def _page(request: Request) -> tuple[int, str, str | None]:
    query = request.query_params
    _refuse_queries(request, "limit", "order", "after")
    limit, order = query.get("limit", "20"), query.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= _MAX_LISTED):
        raise invalid("limit", f"must be in the range 1 to {_MAX_LISTED}, got {limit[:80]!r}")
    if order not in ("asc", "desc"):
        raise invalid("order", f"must be asc or desc, got {order[:80]!r}")
    return int(limit), order, query.get("after")


async def _count(service: Service, body: InputTokensRequest, caller: Caller) -> InputTokens:
    service.ready(body.model)  # before the store is read
    asked = body.asked(caller, await conversation_of(_store(service), caller.key_owner, body))
    return {"object": "response.input_tokens", "input_tokens": await count_prompt_tokens(service, asked)}


def _store(service: Service) -> ResponseStore:
    return _state(service).store


def background_responses(service: Service) -> BackgroundResponses:
    return _state(service).background


def _state(service: Service) -> ResponsesState:
    state = service.api_states[API_NAME]
    assert isinstance(state, ResponsesState)
    return state
