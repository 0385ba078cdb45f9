"""The body of POST /v1/messages/batches: one object with all requests. The body is converted to a file with one line
per request.

A body may be large, so it is written to disk while it arrives. A thread then splits it into requests, without parsing
each request.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Final

import msgspec
import orjson
from fastapi import Request

from moeserve.httpserver.batches.bodies import RawBatch
from moeserve.httpserver.batches.input_lines import MAX_LINES
from moeserve.httpserver.batches.store import BatchStore
from moeserve.httpserver.transport.errors import ApiError, invalid

MAX_BATCH_BYTES: Final = 64 << 20  # the body is in memory while it is split
_CUSTOM_ID: Final = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_PAUSE_EVERY: Final = 200  # requests after which the thread lets the event loop run


async def keep_requests(request: Request, store: BatchStore, owner: str, batch_id: str, kept: str) -> int:
    """Writes the requests of the body to the file `kept`. Returns their number. Raises ApiError with status 400 for a
    body of another form, 413 without room for it, 500 if the folder cannot be written."""
    try:
        name, file = store.folder.open_upload(batch_id)
    except OSError as error:
        raise ApiError(
            500,
            f"the batch folder failed: {error}; free disk space or mend --batch-dir, and try again",
            code="storage_error",
        ) from error
    try:
        with os.fdopen(file, "wb") as writer:
            size = 0
            async for data in request.stream():
                size += len(data)
                if 2 * size > store.room(owner):  # twice, to leave room for the answers
                    raise store.no_room()
                await store.on_disk(writer.write, data)
        count = await store.on_disk(_split, store.folder.path / name)
        await store.on_disk(store.folder.keep_upload, name, kept)
    except BaseException:  # also if the client disconnects
        store.folder.remove(name)
        raise
    return count


def _split(path: Path) -> int:
    """Rewrites the body's file with one request per line. Returns their number. Raises ApiError 400."""
    try:
        requests = msgspec.json.decode(path.read_bytes(), type=RawBatch).requests
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is no batch of requests: {error}", code="invalid_json") from error
    if not 1 <= len(requests) <= MAX_LINES:
        raise invalid("requests", f"must have 1 to {MAX_LINES} requests, got {len(requests)}")
    seen: set[str] = set()
    with path.open("wb") as file:
        for place, one in enumerate(requests):
            param = f"requests.{place}"
            if _CUSTOM_ID.fullmatch(one.custom_id) is None:
                message = f"must be 1 to 64 letters, digits, - and _, got {one.custom_id[:80]!r}"
                raise invalid(f"{param}.custom_id", message)
            if one.custom_id in seen:
                raise invalid(f"{param}.custom_id", f"{one.custom_id!r} is not unique in the batch")
            seen.add(one.custom_id)
            body = orjson.loads(bytes(one.params))
            if not isinstance(body, dict):
                raise invalid(f"{param}.params", "must be an object")
            if body.get("stream"):
                raise invalid(f"{param}.params.stream", "answers of a batch are not streamed; leave it out")
            line = {"custom_id": one.custom_id, "url": "/v1/messages", "body": body}
            file.write(orjson.dumps(line) + b"\n")
            if place % _PAUSE_EVERY == 0:
                time.sleep(0.001)
        file.flush()
        os.fsync(file.fileno())
    return len(requests)
