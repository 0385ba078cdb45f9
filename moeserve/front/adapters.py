"""LoRA adapters that clients load and unload: finds the model that such a request is for, and the names that requests
may use.

Each model's router keeps the list of the model's adapters in a file that outlives the model's server, so that a model
has its adapters again when it is loaded again. The front reads the names from that file, and writes the file only while
the model has no process.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from pathlib import Path
from typing import Final

import msgspec

from moeserve.front.file_looks import FileLooks
from moeserve.front.pool import ModelPool
from moeserve.front.pooled_model import PooledModel
from moeserve.front.schedule import State
from moeserve.httpserver.generation.engine.served_adapters import path_within
from moeserve.httpserver.transport.errors import ApiError, invalid
from moeserve.messages.adapters import SavedAdapter

LOAD: Final = "/v1/load_lora_adapter"
UNLOAD: Final = "/v1/unload_lora_adapter"
PEFT_CONFIG: Final = "adapter_config.json"
MAX_CONFIG_BYTES: Final = 1 << 20
MAX_LIST_BYTES: Final = 16 << 20  # the most bytes of a list: enough for 1,024 adapters with long paths

# The quantization type at the end of a file's name, in the form of `_plain`.
_TYPE: Final = re.compile(r"-(ud-)?(i?q\d|tq\d|bf16|f16|fp16|f32|mxfp4|nvfp4)(-[a-z0-9]+)*$")

log = logging.getLogger(__name__)


class _Named(msgspec.Struct):
    """The fields of both requests that the front needs. The model's server checks all fields again."""

    lora_name: str
    lora_path: str = ""
    base_model_name: str | None = None


def adapters_file(directory: Path, model: PooledModel) -> Path:
    """Returns the path of the list of the model's adapters. It lies in the runtime directory, so the list outlives a
    front that is replaced."""
    return directory / f"adapters-{hashlib.sha256(model.name.encode()).hexdigest()[:16]}.json"


class LoadedAdapters:
    """The adapters of all models of a pool."""

    def __init__(self, pool: ModelPool, directory: Path) -> None:
        self._pool = pool
        # Of its own: clients name the paths, and so may hold its threads.
        self._looks = FileLooks()
        self._directory = directory
        self.look()

    def look(self) -> None:
        """Reads the names of each model's adapters."""
        for model in self._pool.listed:
            names = [one.name for one in self._saved(model) if one.is_served]
            names = [name for name in names if name not in model.served.names]
            if tuple(names) != model.adapters:
                self._pool.set_adapters(model, names)

    async def model_for(self, path: str, query_model: str | None, body: bytes) -> PooledModel:
        """Returns the model whose server a request to load or unload an adapter is for. Raises ApiError: 404 if no
        model has the adapter to unload or the named model is unknown, 403 if several models are served and none has
        --lora-dir, 400 if the adapter's name is another model's, if its model is not clear, and for a body of another
        form; with several models also as `_base_within`."""
        self.look()
        asked = _named_in(body)
        named = query_model or asked.base_model_name
        holder = self._pool.find(asked.lora_name) if self._pool.has(asked.lora_name) else None
        if path == UNLOAD:
            if holder is None:
                message = f"The lora adapter '{asked.lora_name[:200]}' cannot be found."
                raise ApiError(404, message, param="lora_name")
            return holder
        model = self._pool.find(named) if named else holder or await self._by_base(asked)
        if holder is not None and holder is not model:
            raise invalid("lora_name", f"is a name of {holder.name!r}; choose another")
        return model

    def forget(self, model: PooledModel, body: bytes) -> str | None:
        """Unloads an adapter of a model that has no process. Returns a sentence for the client; None if the model has a
        server, which must unload the adapter."""
        name = _named_in(body).lora_name
        if model.state is not State.UNLOADED or name not in model.adapters:
            return None
        left = [one for one in self._saved(model) if one.name != name]
        file = adapters_file(self._directory, model)
        beside = file.with_suffix(".new")
        beside.write_bytes(msgspec.json.encode(left))
        beside.replace(file)
        self.look()
        return f"Success: LoRA adapter '{name}' removed successfully."

    async def _by_base(self, asked: _Named) -> PooledModel:
        """Returns the model that the adapter's files name, or the only model."""
        models = self._pool.listed
        if len(models) == 1:
            return models[0]
        takers = [model for model in models if model.served.config.lora_dir is not None]
        if not takers:
            message = "adapters cannot be loaded or unloaded: the server was started without --lora-dir"
            raise ApiError(403, message, code="not_allowed")
        base, refusal = "", None
        found = []
        for model in takers:
            assert model.served.config.lora_dir is not None
            try:
                base = await self._base_within(model.served.config.lora_dir, asked.lora_path)
            except ApiError as error:
                refusal = error
                continue
            if _is_called(model, base):
                found.append(model)
        if len(found) == 1:
            return found[0]
        if refusal is not None and not base and not found:
            raise refusal
        said = f"its files name {base[:200]!r}, which " if base else "its files do not say, so this "
        which = f"fits {len(found)} models" if found else "is none of the models" if base else "must be told"
        served = ", ".join(repr(model.name) for model in takers)
        message = f"which model the adapter belongs to is not clear: {said}{which}; give one of {served}"
        raise invalid("base_model_name", message)

    async def _base_within(self, lora_dir: str, path: str) -> str:
        """Returns the base model that the files at `path` name; "" if they name none. Raises ApiError as
        `path_within` does, and 503 if the file system does not answer."""
        try:
            return await self._looks.look((lora_dir, path), lambda: _base_of(path_within(lora_dir, path)))
        except TimeoutError:
            message = "the file system of the folder of --lora-dir does not answer; try again later"
            raise ApiError(503, message, param="lora_path") from None

    def _saved(self, model: PooledModel) -> list[SavedAdapter]:
        try:
            with adapters_file(self._directory, model).open("rb") as file:
                return msgspec.json.decode(file.read(MAX_LIST_BYTES), type=list[SavedAdapter])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            log.error("the adapters of %s cannot be read: %s", model.name, error)
            return []


def _named_in(body: bytes) -> _Named:
    """Raises ApiError 400."""
    try:
        return msgspec.json.decode(body, type=_Named)
    except msgspec.ValidationError as error:
        raise ApiError(400, f"the body is invalid: {error}", code="invalid_value") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _base_of(path: Path) -> str:
    """Returns the base model that a PEFT adapter's configuration names; "" if it names none, and for a GGUF file."""
    try:
        # The file is not read through a link, which may lead out of --lora-dir.
        descriptor = os.open(path / PEFT_CONFIG, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            found = json.loads(file.read(MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        return ""
    base = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    return base if isinstance(base, str) else ""


def _is_called(model: PooledModel, base: str) -> bool:
    """True if `base` (a path or a name of the Hub) is the model: one of its names, or its file's name without the
    quantization type."""
    plain = _plain(base)
    path = Path(model.served.config.model)
    names = {
        _plain(name) for name in (*model.served.names, path.stem if path.suffix == ".gguf" else path.name)
    }
    return bool(plain) and any(plain in (name, _TYPE.sub("", name)) for name in names)


def _plain(name: str) -> str:
    """Returns the last part of a path or name, in lower case and with one kind of separator."""
    return re.sub(r"[-_.: ]+", "-", name.rstrip("/").rpartition("/")[2].lower().removesuffix(".gguf"))
