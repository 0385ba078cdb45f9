"""vLLM's endpoints /v1/load_lora_adapter and /v1/unload_lora_adapter."""

from __future__ import annotations

from typing import Any, Final

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.engine.served_adapters import path_within
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.native.bodies import LoadAdapterRequest, UnloadAdapterRequest
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.httpserver.transport.openapi import documented
from moeserve.models.adapters.modules import is_name

router = APIRouter(tags=["Adapters"], route_class=DocumentedRoute)
_TEXT: Final[dict[int | str, dict[str, Any]]] = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}}
}


@router.post(
    "/v1/load_lora_adapter",
    openapi_extra=documented(LoadAdapterRequest, {"lora_name": "name", "lora_path": "folder"}),
    response_class=Response,
    responses=_TEXT,
)
async def load_adapter(request: Request) -> Response:
    """Loads a LoRA adapter from the folder of --lora-dir. The answer is sent when requests may name the adapter."""
    body = await read_body(request, LoadAdapterRequest)
    service = service_of(request)
    directory = _directory(service)
    if not is_name(body.lora_name):
        raise invalid("lora_name", "has characters that cannot be shown")
    if body.lora_name == service.model_name or body.lora_name in service.aliases:
        raise invalid("lora_name", "is a name of the model itself; choose another")
    if body.base_model_name and body.base_model_name not in (service.model_name, *service.aliases):
        raise invalid("base_model_name", f"is not the served model, {service.model_name!r}")
    path = path_within(directory, body.lora_path)
    text = await service.engine.adapters.load(body.lora_name, path, replaces=body.load_inplace)
    return Response(text, media_type="text/plain")


@router.post(
    "/v1/unload_lora_adapter",
    openapi_extra=documented(UnloadAdapterRequest, {"lora_name": "name"}),
    response_class=Response,
    responses=_TEXT,
)
async def unload_adapter(request: Request) -> Response:
    """Unloads a LoRA adapter. New requests can no longer name it. Running requests continue, and the adapter's memory
    is freed when they have ended."""
    body = await read_body(request, UnloadAdapterRequest)
    service = service_of(request)
    _directory(service)
    text = await service.engine.adapters.unload(body.lora_name)
    return Response(text, media_type="text/plain")


def _directory(service: Service) -> str:
    """Returns the folder of --lora-dir. Raises ApiError without that option."""
    directory = service.config.lora_dir
    if directory is None:
        message = "adapters cannot be loaded or unloaded: the server was started without --lora-dir"
        raise ApiError(403, message, code="not_allowed")
    service.engine.state.require_ready()
    return directory
