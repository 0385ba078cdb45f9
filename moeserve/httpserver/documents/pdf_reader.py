"""PdfReader: has a sandboxed process read PDFs, one at a time, and keeps their texts for later turns."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256
from sys import getsizeof
from typing import Final

from moeserve.httpserver.documents.pdf_protocol import MAX_TEXT_BYTES, Refused, decode_reply
from moeserve.processes.sandbox.parent import (
    Sandbox,
    SandboxDied,
    SandboxLost,
    SandboxTimeout,
    SandboxUnavailable,
)

TIMEOUT_S: Final = 5.0  # seconds of CPU time for one PDF
# Size of the cache of texts: a conversation sends its PDFs again with every turn.
CACHE_BYTES: Final = 32 << 20
_ENTRY_BYTES: Final = 256  # of an entry without its text


class PdfError(ValueError):
    """The PDF is at fault; the text is for the client."""


class PdfReader:
    """Owns one reading process, which starts with the first PDF. Tenants take turns."""

    def __init__(self, timeout: float = TIMEOUT_S) -> None:
        """timeout: seconds of CPU time for a PDF."""
        self._sandbox = Sandbox(
            "moeserve.httpserver.documents.pdf_process",
            "PDFs",
            timeout=timeout,
            max_reply_bytes=2 * MAX_TEXT_BYTES,
        )
        # By tenant and the SHA-256 of the file: how fast an answer is tells nothing about other tenants' files.
        self._texts: OrderedDict[tuple[str, bytes], str] = OrderedDict()
        self._text_bytes = 0

    async def read(self, data: bytes, tenant: str = "") -> str:
        """Returns the PDF's text. Raises PdfError, and SandboxUnavailable for failures that the PDF did not cause."""
        key = tenant, sha256(data).digest()
        if (text := self._texts.get(key)) is not None:
            self._texts.move_to_end(key)
            return text
        text = await self._sandbox.run(lambda: self._ask(data), tenant)
        self._keep(key, text)
        return text

    def close(self) -> None:
        self._sandbox.close()

    def _keep(self, key: tuple[str, bytes], text: str) -> None:
        if key in self._texts:
            return  # another request has sent it meanwhile
        self._texts[key] = text
        self._text_bytes += _size(text)
        while self._text_bytes > CACHE_BYTES:
            _, oldest = self._texts.popitem(last=False)
            self._text_bytes -= _size(oldest)

    def _ask(self, data: bytes) -> str:
        try:
            reply = decode_reply(self._sandbox.ask_or_ask_another(data, "read it"))
        except SandboxTimeout as error:
            raise PdfError(f"takes too long to read: it {error}") from error
        except (SandboxDied, ValueError) as error:
            self._sandbox.stop()
            raise PdfError("cannot be read: it is damaged or takes too much memory") from error
        except SandboxLost as error:
            raise SandboxUnavailable(f"the process for PDFs {error}") from error
        if isinstance(reply, Refused):
            raise PdfError(reply.message)
        return reply.text


def _size(text: str) -> int:
    return getsizeof(text) + _ENTRY_BYTES
