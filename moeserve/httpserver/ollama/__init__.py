"""Ollama's API with Ollama's error shape, for tools that support no other API."""

from moeserve.httpserver.ollama import models, pull_routes, routes
from moeserve.httpserver.ollama.bodies import ChatBody, DeleteBody, GenerateBody, PullBody, ShowBody
from moeserve.httpserver.ollama.objects import OllamaError
from moeserve.httpserver.transport.api_table import Api
from moeserve.httpserver.transport.errors import ApiError


def error_body(error: ApiError, request_id: str = "") -> OllamaError:
    return {"error": error.message}


API = Api(
    name="ollama",
    routers=(routes.router, models.router, pull_routes.router),
    bodies=(ChatBody, GenerateBody, ShowBody, PullBody, DeleteBody),
    error_body=error_body,
    error_model=OllamaError,
    prefix="/api/",
)
