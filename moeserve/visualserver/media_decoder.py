"""Decodes untrusted files in a process of its own, within limits of pixels, bytes, time and memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar

from moeserve.processes.sandbox.parent import (
    Sandbox,
    SandboxDied,
    SandboxLost,
    SandboxTimeout,
    SandboxUnavailable,
)
from moeserve.visualserver.decode_protocol import Refused
from moeserve.visualserver.tower_file import MOST_TOKENS

_MOST_SIDE: Final = 64 * 8  # pixels of the longest side of a token

T = TypeVar("T")


class PictureError(ValueError):
    """The picture or video is at fault; the text is for the client."""


class MediaDecoder:
    """Decodes untrusted files in a sandboxed process, which is started with the first file."""

    def __init__(self, module: str, work: str, timeout: float) -> None:
        """module: the process's main module. work: name of its work, for messages. timeout: seconds of CPU time for a
        file."""
        self._work = work
        self._sandbox = Sandbox(
            module, work, timeout=timeout, max_reply_bytes=3 * MOST_TOKENS * _MOST_SIDE**2
        )

    def start(self) -> None:
        """Starts the process in advance, so that the first file need not wait for it. Raises SandboxUnavailable."""
        self._sandbox.run_sync(self._sandbox.start)

    def close(self) -> None:
        self._sandbox.close()

    def ask(self, frame: bytes, decode_reply: Callable[[bytes], T | Refused]) -> T:
        """Sends a request. Raises PictureError, or SandboxUnavailable if the file is not to blame. Blocks."""
        return self._sandbox.run_sync(lambda: self._ask(frame, decode_reply))

    def _ask(self, frame: bytes, decode_reply: Callable[[bytes], T | Refused]) -> T:
        try:
            reply = decode_reply(self._sandbox.ask_or_ask_another(frame, "decode it"))
        except SandboxTimeout as error:
            raise PictureError(f"takes too long to decode: it {error}; send a smaller one") from error
        except (SandboxDied, ValueError) as error:
            self._sandbox.stop()
            raise PictureError("cannot be decoded: it takes too much memory; send a smaller one") from error
        except SandboxLost as error:
            raise SandboxUnavailable(f"the process for {self._work} {error}") from error
        if isinstance(reply, Refused):
            raise PictureError(reply.message)
        return reply
