"""/v1/messages/batches: Anthropic's message batches."""

from __future__ import annotations

import time
from typing import Final

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.batches.batch_routes import cancel
from moeserve.httpserver.batches.bodies import CreateMessageBatchRequest
from moeserve.httpserver.batches.message_batch_input import keep_requests
from moeserve.httpserver.batches.objects import (
    DeletedMessageBatch,
    MessageBatch,
    MessageBatchList,
    message_batch,
)
from moeserve.httpserver.batches.queries import bytes_of, limit_of, queries, store_of
from moeserve.httpserver.batches.records import Batch, new_id
from moeserve.httpserver.batches.store import BatchStore, page
from moeserve.httpserver.generation.request.caller import caller_of
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import invalid
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import JsonResponse

router = APIRouter(tags=["Anthropic"], route_class=DocumentedRoute)

PATH: Final = "/v1/messages/batches"
WINDOW_S: Final = 86400


@router.post(
    PATH,
    openapi_extra=documented(
        CreateMessageBatchRequest,
        {
            "requests": [
                {
                    "custom_id": "first",
                    "params": {
                        "model": "",
                        "max_tokens": 64,
                        "messages": [{"role": "user", "content": "Hello"}],
                    },
                }
            ]
        },
    ),
    responses={200: {"model": MessageBatch}},
)
async def create_message_batch(request: Request) -> Response:
    """Starts to answer the requests in the background."""
    store, owner = store_of(request), caller_of(request).key_owner
    store.check_room_for_batch(owner)
    batch_id, now = new_id("msgbatch_"), int(time.time())
    kept = f"batches/{batch_id}.requests"
    count = await keep_requests(request, store, owner, batch_id, kept)
    batch = Batch(
        id=batch_id,
        owner=owner,
        style="anthropic",
        endpoint="/v1/messages",
        requests=kept,
        created_at=now,
        expires_at=now + WINDOW_S,
        total=count,
        output_file_id="",
        error_file_id="",
    )
    await store.save(batch)
    store.changed()
    return _answer(request, store, batch)


@router.get(PATH, responses={200: {"model": MessageBatchList}})
async def list_message_batches(request: Request) -> Response:
    """Lists the batches of this API key, newest first."""
    store = store_of(request)
    query = queries(request, "limit", "after_id", "before_id", "beta")
    mine = store.batches_of(caller_of(request).key_owner, "anthropic")
    limit = limit_of(query, 20, 1000)
    if (before := query.get("before_id")) is not None:
        found, more = page(mine, before, limit, newest_first=False)
        found = found[::-1]
    else:
        found, more = page(mine, query.get("after_id"), limit)
    listed: MessageBatchList = {
        "data": [_object(request, store, batch) for batch in found],
        "has_more": more,
        "first_id": found[0].id if found else None,
        "last_id": found[-1].id if found else None,
    }
    return JsonResponse(listed)


@router.get(PATH + "/{batch_id}", responses={200: {"model": MessageBatch}})
async def get_message_batch(request: Request, batch_id: str) -> Response:
    """Returns a batch's state."""
    store, batch = _asked(request, batch_id)
    return _answer(request, store, batch)


@router.get(PATH + "/{batch_id}/results", response_class=Response)
async def get_message_batch_results(request: Request, batch_id: str) -> Response:
    """Returns the results of an ended batch, one per line."""
    store, batch = _asked(request, batch_id)
    if not batch.is_ended:
        raise invalid("batch_id", f"{batch.id} has not ended: its results are there when it has")
    return bytes_of(store, batch.output, "application/x-jsonl")


@router.post(PATH + "/{batch_id}/cancel", responses={200: {"model": MessageBatch}})
async def cancel_message_batch(request: Request, batch_id: str) -> Response:
    """Cancels a batch. Results so far are kept."""
    store, batch = _asked(request, batch_id)
    if not batch.is_ended:
        await cancel(store, batch)
    return _answer(request, store, batch)


@router.delete(PATH + "/{batch_id}", responses={200: {"model": DeletedMessageBatch}})
async def delete_message_batch(request: Request, batch_id: str) -> Response:
    """Deletes an ended batch and its results."""
    store, batch = _asked(request, batch_id)
    await store.delete_batch(batch)
    deleted: DeletedMessageBatch = {"id": batch.id, "type": "message_batch_deleted"}
    return JsonResponse(deleted)


def _asked(request: Request, batch_id: str) -> tuple[BatchStore, Batch]:
    queries(request, "beta")
    store = store_of(request)
    return store, store.batch(caller_of(request).key_owner, batch_id, "anthropic")


def _answer(request: Request, store: BatchStore, batch: Batch) -> Response:
    return JsonResponse(_object(request, store, batch))


def _object(request: Request, store: BatchStore, batch: Batch) -> MessageBatch:
    url = f"{str(request.base_url).rstrip('/')}{PATH}/{batch.id}/results"
    return message_batch(batch, store.counts(batch), url)
