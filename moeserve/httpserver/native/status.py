"""The version, the models and the load. These routes answer while the model is still loading."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request, Response

from moeserve import __version__
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.native.loads import loads_of
from moeserve.httpserver.native.objects import Loads, ModelCard, ModelList, Version
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.sse import JsonResponse

router = APIRouter(tags=["Status"], route_class=DocumentedRoute)


@router.get("/version", responses={200: {"model": Version}})
async def get_version(request: Request) -> Response:
    """The server's version."""
    found: Version = {"version": __version__}
    return JsonResponse(found)


@router.get("/v1/loads", responses={200: {"model": Loads}})
async def loads(request: Request) -> Response:
    """Returns how busy the server is, in SGLang's format."""
    return JsonResponse(loads_of(service_of(request)))


@router.get("/v1/models", responses={200: {"model": ModelList}})
async def list_models(request: Request) -> Response:
    """The served model under each of its names, and its LoRA adapters."""
    service = service_of(request)
    names = [service.model_name, *sorted(service.aliases), *service.adapters]
    models: ModelList = {
        "object": "list",
        "data": [_card(service, name) for name in names],
        "has_more": False,
        "first_id": names[0],
        "last_id": names[-1],
    }
    return JsonResponse(models)


@router.get("/v1/models/{model:path}", responses={200: {"model": ModelCard}})
async def get_model(request: Request, model: str) -> Response:
    """The model, by its served name, or an adapter."""
    service = service_of(request)
    if not service.has_model(model):
        raise service.unknown_model(model)
    return JsonResponse(_card(service, model))


def _card(service: Service, name: str) -> ModelCard:
    most = service.engine.state.max_model_len or service.config.max_model_len
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "moeserve",
        "root": service.adapters[name].path if name in service.adapters else service.model_name,
        "parent": service.model_name if name in service.adapters else None,
        "max_model_len": most,
        "context_length": most,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(service.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "max_input_tokens": most,
        "architecture": {
            "input_modalities": _modalities(service),
            "output_modalities": ["text"],
        },
    }


def _modalities(service: Service) -> list[str]:
    """Returns what the model reads. While it is loaded, videos are not known yet."""
    if service.config.mmproj is None:
        return ["text"]
    pictures = None if service.text is None else service.text.pictures
    has_videos = pictures is not None and pictures.of_family.video
    return ["text", "image", *(["video"] if has_videos else [])]
