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

TIMEOUT_S: Final = 20.0  # of CPU time; 48 million pixels of PNG take 2 to 4
_MOST_SIDE: Final = 64 * 8  # pixels of a token


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
        """uint8 [height, width, 3], of a size that `rule` gives. Raises PictureError, and SandboxUnavailable where the
        picture is not to blame. Blocks."""
        return self._sandbox.run_sync(lambda: self._decode(encode(Decode(data, rule))))

    def start(self) -> None:
        """So that the first picture need not wait for it. Raises SandboxUnavailable."""
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
        """A process that was lost may have been killed for another's sake, so a second one is asked."""
        if self._sandbox.is_running:
            with suppress(SandboxLost):
                return self._sandbox.ask(frame, "decode it")
        self._sandbox.start()
        return self._sandbox.ask(frame, "decode it")
