"""The lists of models with their states, in each API's format, and llama-server's routes that load and unload.

The front answers these requests itself: they load no model, and work while models load."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.datastructures import State as AppState

from moeserve import __version__
from moeserve.front.file_looks import FileLooks
from moeserve.front.model_events import LLAMA_STATES
from moeserve.front.pooled_model import PooledModel
from moeserve.front.probes import pool_of
from moeserve.front.requested_model import asked_in
from moeserve.front.schedule import State
from moeserve.httpserver.ollama.models import NEVER, OLLAMA_VERSION, modified_at
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.sse import JsonResponse

router = APIRouter(tags=["Status"])


@router.get("/v1/models")
@router.get("/models")
async def list_models(request: Request) -> Response:
    """All models under each of their names, with their states."""
    cards = [_card(request, model, name) for model in pool_of(request).listed for name in model.names]
    listed = {
        "object": "list",
        "data": cards,
        "has_more": False,
        "first_id": cards[0]["id"],
        "last_id": cards[-1]["id"],
    }
    return JsonResponse(listed)


@router.get("/v1/models/{model:path}")
async def get_model(request: Request, model: str) -> Response:
    """One model, by any of its names."""
    return JsonResponse(_card(request, pool_of(request).find(model), model))


@router.post("/models/load")
async def load_model(request: Request) -> Response:
    """Begins to load a model; the list of models shows its state. A loaded model stays loaded."""
    pool, model = pool_of(request), await _named(request)
    if model.state not in (State.LOADED, State.LOADING):
        await pool.load(model)
    return JsonResponse({"success": True})


@router.post("/models/unload")
async def unload_model(request: Request) -> Response:
    """Unloads a model when its running requests have ended. The next request loads it again."""
    pool_of(request).unload(await _named(request))
    return JsonResponse({"success": True})


async def _named(request: Request) -> PooledModel:
    """Returns the model that the body names. Raises ApiError."""
    asked = await asked_in(request.url.path, b"", await request.body())
    if asked.model is None:
        raise ApiError(400, "model: is missing; name one of /v1/models", param="model", code="missing_field")
    return pool_of(request).find(asked.model)


@router.get("/version")
async def get_version(request: Request) -> Response:
    """The server's version."""
    return JsonResponse({"version": __version__})


def props_of_all(first: PooledModel) -> dict[str, Any]:
    """Returns the answer to /props without a model while the first model is not loaded, as llama-server gives it for
    several models: `role` tells clients to ask for the list. The context's length is the first model's, in tokens."""
    config = first.served.config
    most = config.max_model_len if first.needs is None else first.needs.max_model_len
    return {
        "role": "router",
        "models_autoload": True,
        "default_generation_settings": {"n_ctx": most or 0, "params": {}},
        "total_slots": config.max_num_seqs,
        "model_alias": first.name,
        "model_path": first.name,
        "chat_template": "",
        "bos_token": "",
        "eos_token": "",
        "modalities": {"vision": config.mmproj is not None, "audio": False},
        "build_info": f"moeserve {__version__}",
    }


def _card(request: Request, model: PooledModel, name: str) -> dict[str, Any]:
    created: int = request.app.state.created
    most = model.served.config.max_model_len if model.needs is None else model.needs.max_model_len
    own, *_ = model.served.names
    is_adapter = name in model.served.adapters or name in model.adapters
    status: dict[str, Any] = {"value": LLAMA_STATES[model.state]}
    if model.failure and model.state is State.UNLOADED:
        status |= {"failed": True, "reason": model.failure}
    if model.state is State.LOADING:
        status |= {"stage": model.stage, "fraction": model.fraction}
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "moeserve",
        "root": own,
        "parent": own if is_adapter else None,
        "max_model_len": most,
        "context_length": most,
        "type": "model",
        "display_name": name,
        "created_at": _time_text(datetime.fromtimestamp(created, UTC)),
        "max_input_tokens": most,
        "architecture": {
            "input_modalities": ["text"] if model.served.config.mmproj is None else ["text", "image"],
            "output_modalities": ["text"],
        },
        "status": status,
        "state": str(model.state),
        "pinned": model.is_pinned,
        "memory_bytes": None
        if model.need is None
        else {"ram": model.need.ram, "gpu": model.need.gpu},  # as planned
        "gpus": list(model.gpus),
    }


# ---------------------------------------------------------------- Ollama's


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    """All models under each of their names, as Ollama lists them."""
    listed = pool_of(request).listed
    files = await files_of(request.app.state, listed)
    models = [
        _tag(model, name, file) for model, file in zip(listed, files, strict=True) for name in model.names
    ]
    return JsonResponse({"models": models})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """The loaded models, with the time at which each is unloaded if no request comes."""
    loaded = [model for model in pool_of(request).models if model.state is not State.UNLOADED]
    files = await files_of(request.app.state, loaded)
    found = [
        {
            **_tag(model, model.name, file),
            "size": model.need.ram + model.need.gpu,
            "size_vram": model.need.gpu,
            "context_length": None if model.needs is None else model.needs.max_model_len,
            "expires_at": _expires_at(request, model),
        }
        for model, file in zip(loaded, files, strict=True)
        if model.state is not State.UNLOADED and model.need is not None
    ]
    return JsonResponse({"models": found})


@router.get("/api/version")
async def ollama_version(request: Request) -> Response:
    """The version of Ollama whose API this server offers."""
    return JsonResponse({"version": OLLAMA_VERSION})


def ollama_unloaded(body: bytes, path: str) -> dict[str, Any]:
    """Answers Ollama's request to unload a model: no prompt, and keep_alive 0."""
    name = msgspec.json.decode(body).get("model")
    said = {"response": ""} if path == "/api/generate" else {"message": {"role": "assistant", "content": ""}}
    now = _time_text(datetime.now(UTC))
    return {"model": name, "created_at": now, **said, "done": True, "done_reason": "unload"}


def shown_unloaded(model: PooledModel, file: ListedFile) -> dict[str, Any]:
    """Returns the answer to /api/show for a model that is not loaded. It comes from the file's metadata and has no chat
    template."""
    facts = {} if model.needs is None else model.needs.facts
    family = facts.get("architecture", "")
    most = model.served.config.max_model_len if model.needs is None else model.needs.max_model_len
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": "",
        "template": "",
        "details": _details(model),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": most,
        },
        "capabilities": ["completion", *(["vision"] if model.served.config.mmproj else [])],
        "modified_at": file.modified_at,
    }


def _details(model: PooledModel) -> dict[str, Any]:
    facts = {} if model.needs is None else model.needs.facts
    family = facts.get("architecture", "")
    return {
        "parent_model": "",
        "format": "gguf" if Path(model.served.config.model).suffix == ".gguf" else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": facts.get("size", ""),
        "quantization_level": facts.get("quantization", ""),
    }


@dataclass(frozen=True)
class ListedFile:
    size: int  # bytes; 0 for a folder, and where nothing is known
    modified_at: str  # as ISO 8601; the server's start where nothing is known


async def files_of(state: AppState, models: Sequence[PooledModel]) -> list[ListedFile]:
    """Looks at the models' files, all at once. state: the application's, with `created` and `file_looks`."""
    return await asyncio.gather(*(_file_of(state, model) for model in models))


async def _file_of(state: AppState, model: PooledModel) -> ListedFile:
    looks: FileLooks = state.file_looks
    path, created = model.served.config.model, float(state.created)
    try:
        return await looks.look(("listed", model.place), partial(_listed_file, path, created))
    except TimeoutError:
        return ListedFile(0, _time_text(datetime.fromtimestamp(created, UTC)))


def _listed_file(path: str, created: float) -> ListedFile:
    try:
        size = os.path.getsize(path) if os.path.isfile(path) else 0
    except OSError:  # it has gone since
        size = 0
    return ListedFile(size, modified_at(path, created))


def _tag(model: PooledModel, name: str, file: ListedFile) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": file.modified_at,
        "size": file.size,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(model),
    }


def _expires_at(request: Request, model: PooledModel) -> str:
    if model.idle_limit is None or model.is_pinned:
        return NEVER
    left = model.idle_limit if model.running else model.idle_since + model.idle_limit - pool_of(request).now
    try:
        return _time_text(datetime.now(UTC) + timedelta(seconds=max(0.0, left)))
    except OverflowError:
        return NEVER


def _time_text(when: datetime) -> str:
    return when.isoformat(timespec="seconds").replace("+00:00", "Z")
