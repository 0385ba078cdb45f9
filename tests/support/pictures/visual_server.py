"""An httpserver whose model sees pictures, and a scripted visual server beside it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from moeserve.messages.channels import PullChannel
from moeserve.messages.codec import TO_VISUALSERVER
from moeserve.messages.pictures import EncodePicture, PictureEncoded
from moeserve.messages.schema import ProcessReady
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.runtime_paths import RuntimePaths
from tests.support.pictures.picture_fixture import MODEL, TOWER
from tests.support.servers.engine_messages import ready_message
from tests.support.servers.http_harness import HttpServer
from tests.support.servers.waiting import within

Answer = Callable[[EncodePicture], msgspec.Struct | None]


class VisualServer:
    """In the visual server's place: 3 x 2 tokens for every picture."""

    def __init__(self, server: HttpServer) -> None:
        self.paths = RuntimePaths(Path(server.directory.name))
        self.pictures: list[EncodePicture] = []
        self.files = EmbeddingFiles(self.paths.spans)
        self.answer: Answer = self.encoded
        self._server = server
        self._is_open = True
        self._inbox = PullChannel(server._context, self.paths.visualserver, TO_VISUALSERVER)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def encoded(self, picture: EncodePicture) -> PictureEncoded:
        handle = self.files.write(bytes(6 * 4 * 128))
        return PictureEncoded(picture.id, 3, 2, bytes(32), handle, 0.5, len(self.pictures) > 1)

    def _run(self) -> None:
        while self._is_open:
            message = self._inbox.recv(timeout=0.05)
            if isinstance(message, EncodePicture):
                self.pictures.append(message)
                answer = self.answer(message)
                if answer is not None:
                    self._server.send(answer)

    def close(self) -> None:
        self._is_open = False
        self._thread.join(30)

    @property
    def left(self) -> list[str]:
        """Files of embeddings."""
        return [path.name for path in self.paths.spans.glob("*")]


@contextmanager
def seeing_server(**config: Any) -> Iterator[tuple[HttpServer, VisualServer]]:
    server = HttpServer(**{"model": str(MODEL), "mmproj": str(TOWER)} | config)
    with ExitStack() as closing:
        closing.callback(server.close)
        visual = VisualServer(server)
        closing.callback(visual.close)
        assert isinstance(server.start_message(), ProcessReady)
        engine_sees(server)
        yield server, visual


def engine_sees(server: HttpServer) -> None:
    """The engine says that it is ready for pictures' embeddings."""
    ready = ready_message(server.tokenizer.vocabulary.size, context=server.context)
    server.send(
        msgspec.structs.replace(ready, ready=msgspec.structs.replace(ready.ready, embedding_size=128))
    )
    assert within(30, lambda: server.get("/health").status_code == 200)
