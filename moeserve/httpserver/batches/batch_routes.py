"""/v1/batches: OpenAI's batches, whose requests are lines of an uploaded file."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.batches.bodies import CreateBatchRequest, window_seconds
from moeserve.httpserver.batches.objects import BatchList, BatchObject, batch_object
from moeserve.httpserver.batches.queries import limit_of, queries, store_of
from moeserve.httpserver.batches.records import Batch, new_id
from moeserve.httpserver.batches.store import BatchStore, page
from moeserve.httpserver.generation.request.caller import caller_of
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import JsonResponse

router = APIRouter(tags=["OpenAI"], route_class=DocumentedRoute)


@router.post(
    "/v1/batches",
    openapi_extra=documented(
        CreateBatchRequest,
        {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"},
    ),
    responses={200: {"model": BatchObject}},
)
async def create_batch(request: Request) -> Response:
    """Starts to answer the requests of a file in the background."""
    store, owner = store_of(request), caller_of(request).key_owner
    body = await read_body(request, CreateBatchRequest)
    file = store.file(owner, body.input_file_id)
    if file.purpose != "batch":
        message = f"input_file_id: {file.id} has the purpose {file.purpose}; upload it with the purpose batch"
        raise ApiError(400, message, param="input_file_id", code="invalid_value")
    store.check_room_for_batch(owner)
    now = int(time.time())
    expiry = body.output_expires_after
    batch = Batch(
        id=new_id("batch_"),
        owner=owner,
        style="openai",
        endpoint=body.endpoint,
        input_file_id=file.id,
        requests=file.data,
        created_at=now,
        expires_at=now + window_seconds(body.completion_window),
        completion_window=body.completion_window,
        output_file_id=new_id("file-"),
        error_file_id=new_id("file-"),
        output_expires_after=None if expiry is None else expiry.seconds,
        metadata=None if body.metadata is None else dict(body.metadata),
    )
    await store.save(batch)
    store.changed()
    return _answer(store, batch)


@router.get("/v1/batches", responses={200: {"model": BatchList}})
async def list_batches(request: Request) -> Response:
    """Lists the batches of this API key, newest first."""
    store = store_of(request)
    query = queries(request, "limit", "after")
    mine = store.batches_of(caller_of(request).key_owner, "openai")
    found, more = page(mine, query.get("after"), limit_of(query, 20, 100))
    listed: BatchList = {
        "object": "list",
        "data": [batch_object(batch, store.counts(batch)) for batch in found],
        "first_id": found[0].id if found else None,
        "last_id": found[-1].id if found else None,
        "has_more": more,
    }
    return JsonResponse(listed)


@router.get("/v1/batches/{batch_id}", responses={200: {"model": BatchObject}})
async def get_batch(request: Request, batch_id: str) -> Response:
    """Returns a batch's state."""
    queries(request)
    store = store_of(request)
    return _answer(store, store.batch(caller_of(request).key_owner, batch_id, "openai"))


@router.post("/v1/batches/{batch_id}/cancel", responses={200: {"model": BatchObject}})
async def cancel_batch(request: Request, batch_id: str) -> Response:
    """Cancels a batch. Results so far are kept."""
    store = store_of(request)
    batch = store.batch(caller_of(request).key_owner, batch_id, "openai")
    if batch.is_ended:
        raise ApiError(
            409,
            f"{batch.id} has ended (it is {batch.status}), so there is nothing to cancel",
            code="batch_has_ended",
        )
    await cancel(store, batch)
    return _answer(store, batch)


async def cancel(store: BatchStore, batch: Batch) -> None:
    """Marks a batch as cancelled; the runner then ends it. Raises ApiError 500."""
    if batch.status != "cancelling":
        batch.status, batch.cancelling_at = "cancelling", int(time.time())
        await store.save(batch)
        store.changed()


def _answer(store: BatchStore, batch: Batch) -> Response:
    return JsonResponse(batch_object(batch, store.counts(batch)))
