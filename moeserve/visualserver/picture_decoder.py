"""Decodes untrusted pictures by Pillow in a process of its own."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from moeserve.visualserver.decode_protocol import Decode, decode_reply, encode
from moeserve.visualserver.media_decoder import MediaDecoder
from moeserve.visualserver.picture_size import SizeRule

TIMEOUT_S: Final = 20.0  # seconds of CPU time; a PNG of 48 million pixels takes 2 to 4


class PictureDecoder(MediaDecoder):
    """The `MediaDecoder` of pictures."""

    def __init__(self, timeout: float = TIMEOUT_S) -> None:
        super().__init__("moeserve.visualserver.decode_process", "pictures", timeout)

    def decode(self, data: bytes, rule: SizeRule) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Returns the picture as uint8 [height, width, 3], in the size that `rule` gives. Raises PictureError, or
        SandboxUnavailable if the picture is not to blame. Blocks."""
        reply = self.ask(encode(Decode(data, rule)), decode_reply)
        return np.frombuffer(reply.pixels, np.uint8).reshape(reply.height, reply.width, 3)
