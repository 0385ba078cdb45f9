"""Routes that leave the types of their answers to /openapi.json."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastapi.routing import APIRoute
from starlette.routing import BaseRoute


class DocumentedRoute(APIRoute):
    """A route whose function returns a Response. FastAPI would build a validator for each type in `responses` while the
    process starts, although these types serve the document only."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        """options: see APIRoute."""
        answers = options.pop("responses", None) or {}
        without_types = {
            status: {key: value for key, value in answer.items() if key != "model"}
            for status, answer in answers.items()
        }
        super().__init__(path, endpoint, responses=without_types, **options)
        self._whole = options | {"responses": answers}

    def whole(self) -> APIRoute:
        """Returns the route with the types of its answers, for the document."""
        return APIRoute(self.path, self.endpoint, **self._whole)


def whole_routes(routes: Iterable[BaseRoute]) -> list[BaseRoute]:
    return [route.whole() if isinstance(route, DocumentedRoute) else route for route in routes]
