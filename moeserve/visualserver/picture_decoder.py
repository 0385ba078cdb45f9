"""Decodes untrusted pictures in a process of its own, within limits of pixels, bytes, time and memory."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, Final

import numpy as np

from moeserve.processes.sandbox.parent import (
    Sandbox,
    SandboxDied,
    SandboxLost,
    SandboxTimeout,
    SandboxUnavailable,
)
from moeserve.visualserver.decode_protocol import Decode, Refused, decode_reply, encode
from moeserve.visualserver.picture_size import SizeRule
from moeserve.visualserver.tower_file import MOST_TOKENS

TIMEOUT_S: Final = 20.0  # seconds of CPU time; a PNG of 48 million pixels takes 2 to 4
_MOST_SIDE: Final = 64 * 8  # pixels of the longest side of a token


class PictureError(ValueError):
    """The picture is at fault; the text is for the client."""


class PictureDecoder:
    """Owns one process, started with the first picture."""

    def __init__(self, timeout: float = TIMEOUT_S) -> None:
        self._sandbox = Sandbox(
            "moeserve.visualserver.decode_process",
            "pictures",
            timeout=timeout,
            max_reply_bytes=3 * MOST_TOKENS * _MOST_SIDE**2,
        )

    def decode(self, data: bytes, rule: SizeRule) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the picture as uint8 [height, width, 3], in the size that `rule` gives. Raises PictureError, or
        SandboxUnavailable if the picture is not to blame. Blocks."""
        return self._sandbox.run_sync(lambda: self._decode(encode(Decode(data, rule))))

    def start(self) -> None:
        """Starts the process in advance, so that the first picture need not wait for it. Raises SandboxUnavailable."""
        self._sandbox.run_sync(self._sandbox.start)

    def close(self) -> None:
        self._sandbox.close()

    def _decode(self, frame: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            reply = decode_reply(self._reply(frame))
        except SandboxTimeout as error:
            raise PictureError(f"takes too long to decode: it {error}") from error
        except (SandboxDied, ValueError) as error:
            self._sandbox.stop()
            raise PictureError("cannot be decoded: it takes too much memory") from error
        except SandboxLost as error:
            raise SandboxUnavailable(f"the process for pictures {error}") from error
        if isinstance(reply, Refused):
            raise PictureError(reply.message)
        return np.frombuffer(reply.pixels, np.uint8).reshape(reply.height, reply.width, 3)

    def _reply(self, frame: bytes) -> bytes:
        """Returns the process's reply. If the process is lost, asks a second one, because the first may have been
        killed to free memory for another process."""
        if self._sandbox.is_running:
            with suppress(SandboxLost):
                return self._sandbox.ask(frame, "decode it")
        self._sandbox.start()
        return self._sandbox.ask(frame, "decode it")
