"""Models that clients have downloaded to a server with one model, which does not serve them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from moeserve.httpserver.generation.service import Service

log = logging.getLogger(__name__)


class DownloadedBeside:
    """Implements `DownloadedModels`. /api/tags lists these models, and the error for a request that names one says how
    it can be served (`Service.unknown_model`)."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def require_room(self, name: str) -> None:
        pass  # only the disk bounds the number of models, and the download checks the disk

    def come(self, name: str, path: str) -> None:
        if not os.path.samefile(path, self._service.config.model):
            self._service.downloaded[name] = path
            log.info("%s was downloaded; %s", name, self._service.how_to_serve(name))

    def gone(self, path: str) -> None:
        downloaded = self._service.downloaded
        for name in [name for name, other in downloaded.items() if other == path]:
            del downloaded[name]

    def kept(self) -> Iterable[str]:
        return (self._service.config.model,)
