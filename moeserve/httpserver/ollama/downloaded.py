"""Models that clients have downloaded to a server with one model, which does not serve them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from moeserve.httpserver.generation.service import Service

log = logging.getLogger(__name__)


class DownloadedBeside:
    """Implements `DownloadedModels`: such models are listed by /api/tags, and a request for one is told how to serve
    it (`Service.unknown_model`)."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def require_room(self, name: str) -> None:
        pass  # nothing but the disk bounds it, which the download looks at

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
