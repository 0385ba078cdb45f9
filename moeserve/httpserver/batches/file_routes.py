"""/v1/files: the input and result files of batches."""

from __future__ import annotations

import contextlib
import os
import time
from typing import Final, Literal

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.batches.bodies import HOUR_S, MAX_EXPIRY_S, UploadFileForm
from moeserve.httpserver.batches.multipart import MultipartReader, Part
from moeserve.httpserver.batches.objects import DeletedFile, FileList, FileObject, file_object
from moeserve.httpserver.batches.queries import bytes_of, limit_of, queries, store_of
from moeserve.httpserver.batches.records import StoredFile, new_id
from moeserve.httpserver.batches.store import MAX_FILE_BYTES, BatchStore, page
from moeserve.httpserver.generation.request.caller import caller_of
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.httpserver.transport.openapi import documented_form
from moeserve.httpserver.transport.sse import JsonResponse

router = APIRouter(tags=["OpenAI"], route_class=DocumentedRoute)

MAX_FIELD_BYTES: Final = 1024
MAX_UPLOAD_BYTES: Final = MAX_FILE_BYTES + (64 << 10)  # including the form's fields and boundaries
_SYNC_EVERY: Final = 1 << 20  # bytes written by one call on a thread


@router.post(
    "/v1/files", openapi_extra=documented_form(UploadFileForm), responses={200: {"model": FileObject}}
)
async def upload_file(request: Request) -> Response:
    """Stores a file for a batch."""
    store, owner = store_of(request), caller_of(request).key_owner
    reader = MultipartReader(request.headers.get("content-type", ""))
    file_id = new_id("file-")
    upload = _Upload(store, owner, file_id)
    try:
        async for data in request.stream():
            for piece in reader.feed(data):
                await upload.take(piece)
        reader.end()
        file = await upload.end()
        await store.add_file(file, upload.name)
    except BaseException:  # also if the client disconnects
        upload.drop()
        raise
    return JsonResponse(file_object(file))


@router.get("/v1/files", responses={200: {"model": FileList}})
async def list_files(request: Request) -> Response:
    """Lists the files of this API key, newest first."""
    store = store_of(request)
    query = queries(request, "purpose", "limit", "order", "after")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise invalid("order", f"must be asc or desc, got {order[:80]!r}")
    mine = store.files_of(caller_of(request).key_owner, query.get("purpose"))
    found, more = page(
        mine, query.get("after"), limit_of(query, 10_000, 10_000), newest_first=order == "desc"
    )
    listed: FileList = {
        "object": "list",
        "data": [file_object(file) for file in found],
        "first_id": found[0].id if found else None,
        "last_id": found[-1].id if found else None,
        "has_more": more,
    }
    return JsonResponse(listed)


@router.get("/v1/files/{file_id}", responses={200: {"model": FileObject}})
async def get_file(request: Request, file_id: str) -> Response:
    """Returns a file's description."""
    queries(request)
    return JsonResponse(file_object(store_of(request).file(caller_of(request).key_owner, file_id)))


@router.get("/v1/files/{file_id}/content", response_class=Response)
async def get_file_content(request: Request, file_id: str) -> Response:
    """Returns a file's bytes."""
    queries(request)
    store = store_of(request)
    return bytes_of(store, store.file(caller_of(request).key_owner, file_id).data, "application/octet-stream")


@router.delete("/v1/files/{file_id}", responses={200: {"model": DeletedFile}})
async def delete_file(request: Request, file_id: str) -> Response:
    """Deletes a file, unless a batch still needs it."""
    queries(request)
    await store_of(request).delete_file(caller_of(request).key_owner, file_id)
    deleted: DeletedFile = {"id": file_id, "object": "file", "deleted": True}
    return JsonResponse(deleted)


class _Upload:
    """A file that is being received: its form fields, and its bytes in the folder of uploads."""

    def __init__(self, store: BatchStore, owner: str, file_id: str) -> None:
        """Creates the upload's file. Raises ApiError 500."""
        self._store = store
        self._owner = owner
        self._id = file_id
        self._fields: dict[str, bytes] = {}
        self._at: Literal["file"] | str | None = None
        self._filename: str | None = None
        self._size = 0
        self._held: list[bytes] = []
        self._num_held = 0
        try:
            self.name, self._file = store.folder.open_upload(file_id)
        except OSError as error:
            raise ApiError(
                500,
                f"the batch folder failed: {error}; free disk space or mend --batch-dir, and try again",
                code="storage_error",
            ) from error

    async def take(self, piece: Part | bytes) -> None:
        """Takes the next piece of the form. Raises ApiError."""
        if isinstance(piece, Part):
            self._begin(piece)
        elif self._at == "file":
            self._size += len(piece)
            if self._size > MAX_FILE_BYTES:
                message = f"a file has at most {MAX_FILE_BYTES >> 20} MiB"
                raise ApiError(413, message, param="file", code="file_too_large")
            if self._size > self._store.room(self._owner):
                raise self._store.no_room()
            self._held.append(piece)
            self._num_held += len(piece)
            if self._num_held >= _SYNC_EVERY:
                await self._write()
        else:
            assert self._at is not None
            self._fields[self._at] += piece
            if len(self._fields[self._at]) > MAX_FIELD_BYTES:
                raise invalid(self._at, f"has more than {MAX_FIELD_BYTES} bytes; shorten it")

    def _begin(self, part: Part) -> None:
        if part.name == "file":
            if self._filename is not None:
                raise invalid("file", "there are two: a request uploads one file; send a request for each")
            self._at, self._filename = "file", part.filename or "file"
        else:
            self._at = part.name
            self._fields[part.name] = b""

    async def _write(self) -> None:
        data, self._held, self._num_held = b"".join(self._held), [], 0
        await self._store.on_disk(_write_all, self._file, data)

    async def end(self) -> StoredFile:
        """Ends the upload. Returns the file's record; its bytes are on the disk then. Raises ApiError 400."""
        if self._filename is None:
            raise invalid("file", "is missing: it is the part with the file's bytes")
        purpose = self._fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != "batch":
            raise invalid("purpose", f"must be batch, the only purpose served here, got {purpose[:80]!r}")
        now = int(time.time())
        expires = self._expires_after()
        await self._write()
        await self._store.on_disk(os.fsync, self._file)
        os.close(self._file)
        self._file = -1
        return StoredFile(
            id=self._id,
            owner=self._owner,
            filename=self._filename,
            purpose=purpose,
            bytes=self._size,
            created_at=now,
            expires_at=None if expires is None else now + expires,
            data=f"files/{self._id}.data",
        )

    def _expires_after(self) -> int | None:
        text = self._fields.get("expires_after[seconds]")
        if text is None:
            return None
        if not (text.isdigit() and len(text) < 9 and HOUR_S <= int(text) <= MAX_EXPIRY_S):
            raise invalid("expires_after[seconds]", f"must be in the range {HOUR_S} to {MAX_EXPIRY_S}")
        return int(text)

    def drop(self) -> None:
        """Deletes the bytes received so far."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        with contextlib.suppress(OSError):
            self._store.folder.remove(self.name)


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
