"""The router's links to the embedding files of requests. They exist as long as a plan may use them, even if the
sender removes its own."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from msgspec.structs import replace

from moeserve.messages.prompt_embeddings import EmbeddingSpan
from moeserve.messages.schema import GenerateRequest, RequestError
from moeserve.processes.embedding_files import EmbeddingFiles, Owner

log = logging.getLogger(__name__)


class EmbeddingLinks:
    def __init__(self, files: EmbeddingFiles, row_bytes: int) -> None:
        """row_bytes: bytes of one embedding vector. Removes the links that a killed router has left; the worker must
        have finished that router's plans."""
        files.remove_left(Owner.ROUTER)
        self._files = files
        self._row_bytes = row_bytes
        self._own: set[str] = set()

    def linked(self, message: GenerateRequest) -> GenerateRequest | RequestError:
        """Returns the request with handles of the router's own links, to be removed with `remove`; or an error for
        the client if an embedding file is missing or truncated."""
        spans: list[EmbeddingSpan] = []
        try:
            for span in message.spans:
                handle = self._files.link(span.handle, span.count * self._row_bytes)
                self._own.add(handle)
                spans.append(replace(span, handle=handle))
        except (OSError, ValueError) as error:
            self.remove(span.handle for span in spans)
            log.error("request %d: %s", message.id, error)
            return RequestError(message.id, 500, f"the embeddings of the prompt are not there: {error}")
        return replace(message, spans=spans)

    def remove(self, handles: Iterable[str]) -> None:
        """Removes the router's own handles among these."""
        for handle in self._own.intersection(handles):
            self._own.remove(handle)
            self._files.remove(handle)
