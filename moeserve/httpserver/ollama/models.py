"""/api/tags, /api/ps, /api/show and /api/version: the served model, as Ollama lists models."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.request.sampling_defaults import SamplingDefaults
from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.ollama.bodies import ShowBody, served_name
from moeserve.httpserver.ollama.objects import Details, Model, Models, OllamaVersion, RunningModels, Shown
from moeserve.httpserver.transport.body import read_body
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.openapi import documented
from moeserve.httpserver.transport.sse import JsonResponse
from moeserve.models.facts import UNKNOWN, ModelFacts
from moeserve.sampling.parameters import PARAMETERS

router = APIRouter(tags=["Ollama"], route_class=DocumentedRoute)

# Clients check by this version whether the server has the features that they need: tools, thinking, schemas as formats,
# logprobs; Codex, from 0.13.4 on, /v1/responses.
OLLAMA_VERSION: Final = "0.13.4"
# The time at which the model is unloaded. The model is never unloaded; Ollama gives this date for keep_alive -1.
NEVER: Final = "2318-01-01T00:00:00Z"


@router.get("/api/tags", responses={200: {"model": Models}})
async def tags(request: Request) -> Response:
    """The served model under each of its names, and models that clients have downloaded, which are not served."""
    service = service_of(request)
    downloaded = [
        _model(service, name, path, _details_of(path, UNKNOWN)) for name, path in service.downloaded.items()
    ]
    found: Models = {"models": [*_models(service), *downloaded]}
    return JsonResponse(found)


@router.get("/api/ps", responses={200: {"model": RunningModels}})
async def running(request: Request) -> Response:
    """The served model, which is always loaded, with its context length."""
    service = service_of(request)
    limit = service.engine.state.max_model_len or 0
    found: RunningModels = {
        "models": [
            {**model, "expires_at": NEVER, "size_vram": 0, "context_length": limit}
            for model in _models(service)
        ]
    }
    return JsonResponse(found)


@router.post(
    "/api/show", openapi_extra=documented(ShowBody, {"model": ""}), responses={200: {"model": Shown}}
)
async def show(request: Request) -> Response:
    """The model's chat template and capabilities."""
    body = await read_body(request, ShowBody)
    service = service_of(request)
    served = service.ready(served_name(body.model or body.name or ""))
    text, limit = served.text, served.limit
    capabilities = ["completion"]
    if text.formats.calls_tools:
        capabilities.append("tools")
    if text.formats.thinks:
        capabilities.append("thinking")
    if text.pictures is not None:
        capabilities.append("vision")
    if text.fim is not None:
        capabilities.append("insert")
    shown: Shown = {
        "modelfile": f"FROM {service.model_name}\n",
        "parameters": "\n".join(
            f"{name} {value:g}" for name, value in _parameters(service.sampling_defaults)
        ),
        "template": text.renderer.source or "",
        "details": _details(service),
        "model_info": {
            "general.architecture": text.facts.architecture,
            "general.basename": service.model_name,
            "general.parameter_count": text.facts.parameters,
            f"{text.facts.architecture}.context_length": limit,
        },
        "capabilities": capabilities,
        "modified_at": modified_at(service.config.model, service.created),
    }
    return JsonResponse(shown)


@router.get("/api/version", responses={200: {"model": OllamaVersion}})
async def get_version(request: Request) -> Response:
    """The version of Ollama whose API this server offers."""
    found: OllamaVersion = {"version": OLLAMA_VERSION}
    return JsonResponse(found)


def _parameters(defaults: SamplingDefaults) -> Iterator[tuple[str, float]]:
    for name, value in defaults.settings.items():
        yield PARAMETERS[name].name_in("ollama", name), value
    if defaults.max_tokens is not None:
        yield "num_predict", defaults.max_tokens


def _models(service: Service) -> list[Model]:
    details = _details(service)
    return [
        _model(service, name, service.config.model, details)
        for name in (service.model_name, *sorted(service.aliases), *service.adapters)
    ]


def _model(service: Service, name: str, model: str, details: Details) -> Model:
    path = Path(model)
    return {
        "name": name,
        "model": name,
        "modified_at": modified_at(model, service.created),
        "size": path.stat().st_size if path.is_file() else 0,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": details,
    }


def modified_at(model: str, otherwise: float) -> str:
    """Returns when the model's file, or the newest file of its folder, was last changed, as ISO 8601. otherwise: the
    time to return if it is not there, in seconds since 1970."""
    path = Path(model)
    try:
        files = [each for each in path.iterdir() if each.is_file()] if path.is_dir() else []
        when = max(each.stat().st_mtime for each in files or [path])
        return datetime.fromtimestamp(when, UTC).isoformat().replace("+00:00", "Z")
    except (OSError, OverflowError, ValueError):  # it is gone, or its time is beyond the calendar's
        return datetime.fromtimestamp(otherwise, UTC).isoformat().replace("+00:00", "Z")


def _details(service: Service) -> Details:
    facts = UNKNOWN if service.text is None else service.text.facts  # None while the server is loading
    return _details_of(service.config.model, facts)


def _details_of(model: str, facts: ModelFacts) -> Details:
    return {
        "parent_model": "",
        "format": "gguf" if Path(model).suffix == ".gguf" else "safetensors",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": facts.size,
        "quantization_level": facts.quantization,
    }
