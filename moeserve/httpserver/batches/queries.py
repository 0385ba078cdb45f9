"""Query parameters of lists, and responses with a file's bytes."""

from __future__ import annotations

from fastapi import Request, Response
from starlette.responses import FileResponse

from moeserve.httpserver.batches.store import BatchStore
from moeserve.httpserver.generation.service import Service
from moeserve.httpserver.transport.errors import ApiError, invalid

API_NAME = "batches"


class NoBatches:
    """Stands for the store in a server without --batch-dir."""

    def close(self) -> None:
        pass


def store_of(request: Request) -> BatchStore:
    """Returns the store. Raises ApiError 404 without --batch-dir, and 503 while the folder is not ready."""
    store: BatchStore | None = request.app.state.batches
    if store is None:
        message = "files and batches are off; start the server with --batch-dir and a folder, in which it keeps them"
        raise ApiError(404, message, code="batches_off")
    store.require_open()
    return store


def batch_store(service: Service) -> BatchStore | None:
    """Returns the store; None without --batch-dir."""
    store = service.api_states[API_NAME]
    return store if isinstance(store, BatchStore) else None


def queries(request: Request, *known: str) -> dict[str, str]:
    """Returns the query parameters. Raises ApiError 400 for an unknown one."""
    for name in request.query_params:
        if name not in known:
            raise ApiError(
                400, f"{name[:200]}: there is no such query parameter; leave it out", code="unknown_parameter"
            )
    return dict(request.query_params)


def limit_of(query: dict[str, str], default: int, most: int) -> int:
    """Returns the parameter `limit`. Raises ApiError 400 if it is not in the range 1 to `most`."""
    text = query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) < 7 and 1 <= int(text) <= most):
        raise invalid("limit", f"must be in the range 1 to {most}, got {text[:80]!r}")
    return int(text)


def bytes_of(store: BatchStore, name: str, media_type: str) -> Response:
    """Returns a response that streams a file's bytes."""
    return FileResponse(store.folder.path / name, media_type=media_type)
