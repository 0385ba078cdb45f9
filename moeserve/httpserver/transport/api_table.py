"""Api: the only interface between an API's folder and the server.

Each API is a folder of `httpserver` that exports one `Api` as `API`; `app.py` lists them in one table. The server uses
nothing else of a folder, so a new API is a folder and a line of that table.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from moeserve.config import ServerConfig
from moeserve.httpserver.transport.errors import ApiError, ErrorBody

# The body of an error's answer; the second argument is the request's id.
ErrorShape = Callable[[ApiError, str], Mapping[str, Any]]


# A route's function, which reads the request's body itself.
Endpoint = Callable[[Request], Awaitable[Response]]


class ApiState(Protocol):
    """An API's own resources, held from the server's start to its end."""

    def close(self) -> None: ...


def default_error_body(error: ApiError, request_id: str) -> Mapping[str, Any]:
    return error.body()


@dataclass(frozen=True)
class Api:
    name: str  # unique
    routers: tuple[APIRouter, ...]
    bodies: tuple[type[BaseModel], ...] = ()  # request bodies, for /openapi.json
    streamed: tuple[type, ...] = ()  # typed dicts of its streams' events, for /openapi.json
    error_body: ErrorShape = default_error_body
    error_model: type = ErrorBody  # the typed dict that `error_body` returns, for /openapi.json
    prefix: str | None = None  # paths with this prefix get this API's error shape, even if no route matches
    # A header for the request's id besides x-request-id, on paths with `prefix`.
    request_id_header: str | None = None
    open_paths: frozenset[str] = frozenset()  # need no API key
    quiet_paths: frozenset[str] = frozenset()  # polled every few seconds: logged at debug level, not traced
    # Load balancers' GET routes, matched before all other routes. Their endpoints take the request as their only
    # argument.
    probe_paths: frozenset[str] = frozenset()
    # Paths whose bodies are written to disk while they arrive, each with the most bytes of a body. The bounds on bodies
    # in memory do not apply to them.
    uploads: Mapping[str, int] = field(default_factory=dict)
    # The routes that also answer the lines of batches, by path.
    batched: Mapping[str, Endpoint] = field(default_factory=dict)
    open_state: Callable[[ServerConfig], ApiState] | None = None  # raises ConfigError


class ApiTable:
    """The APIs of a server, looked up by path."""

    def __init__(self, apis: Iterable[Api]) -> None:
        self.apis = tuple(apis)
        self.open_paths = frozenset[str]().union(*(api.open_paths for api in self.apis))
        self.quiet_paths = frozenset[str]().union(*(api.quiet_paths for api in self.apis))
        self.uploads = {path: most for api in self.apis for path, most in api.uploads.items()}
        self.batched = {path: endpoint for api in self.apis for path, endpoint in api.batched.items()}
        prefixed = [(api.prefix, api) for api in self.apis if api.prefix is not None]
        self._prefixed = sorted(prefixed, key=lambda pair: len(pair[0]), reverse=True)

    def error_body(self, path: str, error: ApiError, request_id: str) -> Mapping[str, Any]:
        """Returns the error in the shape that the clients of this path expect."""
        api = self._of(path)
        return error.body() if api is None else api.error_body(error, request_id)

    def error_model(self, path: str) -> type:
        """Returns the typed dict of `error_body`'s result."""
        api = self._of(path)
        return ErrorBody if api is None else api.error_model

    def request_id_header(self, path: str) -> str | None:
        api = self._of(path)
        return None if api is None else api.request_id_header

    def open_states(self, config: ServerConfig) -> dict[str, ApiState]:
        """Opens the APIs' own resources, by API name. If one cannot be opened, closes the others and raises
        ConfigError."""
        states: dict[str, ApiState] = {}
        try:
            for api in self.apis:
                if api.open_state is not None:
                    states[api.name] = api.open_state(config)
        except BaseException:
            for state in states.values():
                state.close()
            raise
        return states

    def _of(self, path: str) -> Api | None:
        """Returns the API whose prefix is the longest one that matches the path."""
        return next((api for prefix, api in self._prefixed if path.startswith(prefix)), None)
