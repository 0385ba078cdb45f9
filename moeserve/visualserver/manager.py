"""The visual server's two threads: one answers messages, the other encodes one picture after another."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.pictures import EncodePicture
from moeserve.messages.schema import HeartbeatRequest, Shutdown, ToVisualServer
from moeserve.visualserver.encoder import PictureEncoder

WAIT_S = 1.0

log = logging.getLogger(__name__)


def serve(
    encoder: PictureEncoder,
    inbox: PullChannel[ToVisualServer],
    to_http: PushChannel,
    heartbeat: Callable[[], None],
) -> None:
    """Serves until Shutdown. A second thread encodes pictures, each for up to a minute, so that this thread can answer
    heartbeats meanwhile. Only the second thread uses to_http. Raises the errors of that thread."""
    waiting: queue.SimpleQueue[EncodePicture] = queue.SimpleQueue()  # httpserver sends one picture at a time
    failure: list[BaseException] = []

    def encode() -> None:
        try:
            while True:
                to_http.send(encoder.answer(waiting.get()))
        except BaseException as error:  # noqa: BLE001  the first thread raises it again
            failure.append(error)

    threading.Thread(target=encode, name="encoding", daemon=True).start()
    while not failure:
        match inbox.recv(WAIT_S):
            case EncodePicture() as picture:
                waiting.put(picture)
            case HeartbeatRequest():
                heartbeat()
            case Shutdown():
                return
            case None:
                continue
    raise failure[0]
