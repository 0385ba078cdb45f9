"""Models that clients download (`/api/pull`). A model joins the server's models after its download, and leaves them
when it is deleted.

A file keeps the models' names and paths, so that a new front process serves them again. With --data-dir the file lies
there, and the next server serves them too.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from moeserve.front.config import MAX_MODELS, FrontConfig
from moeserve.front.file_looks import existing
from moeserve.front.pool import ModelPool
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.refusal import Refusal

RECORD: Final = "downloaded-models.json"
MAX_RECORD_BYTES: Final = 1 << 20

log = logging.getLogger(__name__)


class _Downloaded(msgspec.Struct, frozen=True):
    name: str  # the model's name in the Hub
    path: str  # path of its GGUF file or its folder


class DownloadedModels:
    """Implements the protocol of `httpserver.ollama.pulls` of the same name."""

    def __init__(self, pool: ModelPool, front: FrontConfig, folder: Path) -> None:
        """Adds the models that the record in `folder` names."""
        self._pool = pool
        self._front = front
        self._record = folder / RECORD
        self._models: dict[str, str] = {}  # name -> path
        recorded = self._recorded()
        there = existing(one.path for one in recorded)
        for one in recorded:
            if one.path in there and len(pool.models) < MAX_MODELS:
                self._add(one.name, one.path)
            else:
                log.warning("%s was downloaded once, and is served no longer", one.name)

    def require_room(self, name: str) -> None:
        if name not in self._models and len(self._pool.models) >= MAX_MODELS:
            message = f"{MAX_MODELS} models are served, as many as may be; delete one first"
            raise ApiError(503, message, code="overloaded", refusal=Refusal.QUOTA)

    def come(self, name: str, path: str) -> None:
        self.require_room(name)  # other models may have been added meanwhile
        self._add(name, path)
        self._write()
        if self._pool.has(name):
            self._pool.look_at_file(self._pool.find(name))

    def gone(self, path: str) -> None:
        for name in [name for name, other in self._models.items() if other == path]:
            del self._models[name]
            self._pool.remove(name)
            log.info("%s was deleted", name)
        self._write()

    def kept(self) -> Iterable[str]:
        return [model.served.config.model for model in self._pool.listed if not model.served.is_downloaded]

    def _add(self, name: str, path: str) -> None:
        """Serves the model, if it is not served already. A new revision of a model replaces the one before."""
        if self._models.get(name) == path or (name not in self._models and self._pool.has(name)):
            return
        if name in self._models:
            self._pool.remove(name)
        self._models[name] = path
        self._pool.add(self._front.downloaded(name, path))
        log.info("%s is served from now on", name)

    def _recorded(self) -> list[_Downloaded]:
        try:
            with self._record.open("rb") as file:
                return msgspec.json.decode(file.read(MAX_RECORD_BYTES), type=list[_Downloaded])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.MsgspecError) as error:
            log.error(
                "%s cannot be read, so the models that it names are not served: %s", self._record, error
            )
            return []

    def _write(self) -> None:
        """Replaces the record as a whole."""
        encoded = msgspec.json.encode([_Downloaded(name, path) for name, path in self._models.items()])
        beside = self._record.with_suffix(".new")
        try:
            self._record.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            beside.write_bytes(encoded)
            beside.replace(self._record)
        except OSError as error:
            log.error(
                "%s cannot be written: the next server will not know of a download: %s", self._record, error
            )
