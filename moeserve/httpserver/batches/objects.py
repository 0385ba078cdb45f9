"""Response objects of /v1/files, /v1/batches and /v1/messages/batches, as typed dicts."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Literal

from typing_extensions import TypedDict

from moeserve.httpserver.batches.records import Batch, Status, StoredFile


class FileObject(TypedDict):
    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(TypedDict):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    id: str
    object: Literal["file"]
    deleted: bool


class BatchErrorObject(TypedDict):
    code: str
    message: str
    line: int | None
    param: str | None


class BatchErrors(TypedDict):
    object: Literal["list"]
    data: list[BatchErrorObject]


class BatchRequestCounts(TypedDict):
    total: int
    completed: int
    failed: int


class BatchObject(TypedDict):
    id: str
    object: Literal["batch"]
    endpoint: str
    errors: BatchErrors | None
    input_file_id: str | None
    completion_window: str
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: BatchRequestCounts
    metadata: dict[str, Any] | None


class BatchList(TypedDict):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageBatchCounts(TypedDict):
    processing: int
    succeeded: int
    errored: int
    canceled: int
    expired: int


class MessageBatch(TypedDict):
    id: str
    type: Literal["message_batch"]
    processing_status: Literal["in_progress", "canceling", "ended"]
    request_counts: MessageBatchCounts
    created_at: str
    expires_at: str
    ended_at: str | None
    cancel_initiated_at: str | None
    archived_at: str | None
    results_url: str | None


class MessageBatchList(TypedDict):
    data: list[MessageBatch]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DeletedMessageBatch(TypedDict):
    id: str
    type: Literal["message_batch_deleted"]


def file_object(file: StoredFile) -> FileObject:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created_at,
        "expires_at": file.expires_at,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }


def batch_object(batch: Batch, counts: Mapping[str, int]) -> BatchObject:
    """Returns OpenAI's object of a batch. counts: numbers of its ended requests, by kind."""
    found: list[BatchErrorObject] = [
        {"code": one.code, "message": one.message, "line": one.line, "param": one.param}
        for one in batch.errors
    ]
    errors: BatchErrors | None = {"object": "list", "data": found} if found else None
    failed = sum(counts.get(kind, 0) for kind in ("errored", "expired", "canceled"))

    def ended_as(status: Status) -> int | None:
        return batch.ended_at if batch.status == status else None

    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": errors,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": batch.status,
        "output_file_id": batch.output_file_id if batch.has_output else None,
        "error_file_id": batch.error_file_id if batch.has_errors else None,
        "created_at": batch.created_at,
        "in_progress_at": batch.in_progress_at,
        "expires_at": batch.expires_at,
        "finalizing_at": batch.finalizing_at,
        "completed_at": ended_as("completed"),
        "failed_at": ended_as("failed"),
        "expired_at": ended_as("expired"),
        "cancelling_at": batch.cancelling_at,
        "cancelled_at": ended_as("cancelled"),
        "request_counts": {
            "total": batch.total,
            "completed": counts.get("succeeded", 0),
            "failed": failed,
        },
        "metadata": batch.metadata,
    }


def message_batch(batch: Batch, counts: Mapping[str, int], results_url: str) -> MessageBatch:
    """Returns Anthropic's object of a batch. counts: as for `batch_object`. results_url: URL of its results, valid once
    it has ended."""
    status: Literal["in_progress", "canceling", "ended"] = "in_progress"
    if batch.is_ended:
        status = "ended"
    elif batch.status == "cancelling":
        status = "canceling"
    done = sum(counts.values())
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": status,
        "request_counts": {
            "processing": 0 if batch.is_ended else max(batch.total - done, 0),
            "succeeded": counts.get("succeeded", 0),
            "errored": counts.get("errored", 0),
            "canceled": counts.get("canceled", 0),
            "expired": counts.get("expired", 0),
        },
        "created_at": _date(batch.created_at),
        "expires_at": _date(batch.expires_at),
        "ended_at": None if batch.ended_at is None else _date(batch.ended_at),
        "cancel_initiated_at": None if batch.cancelling_at is None else _date(batch.cancelling_at),
        "archived_at": None,
        "results_url": results_url if batch.is_ended else None,
    }


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
