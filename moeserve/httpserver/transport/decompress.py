"""Decompress: the middleware for request bodies with `Content-Encoding: gzip` or `deflate`.

It is outside `middleware.BodyLimit`, which therefore bounds the decompressed bytes: a body of 32 kB can become 32 MB.
"""

from __future__ import annotations

import zlib
from typing import Final

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from moeserve.httpserver.transport.api_table import ApiTable
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.refuse import refuse

PIECE_BYTES: Final = 1 << 18  # bytes decompressed at once; other requests run between two pieces
_WINDOW_BITS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # zlib's numbers for the two forms


class Decompress:
    """Decompresses bodies. Answers 415 to any other encoding, and 400 to a body that is not in the encoding it
    claims."""

    def __init__(self, app: ASGIApp, apis: ApiTable) -> None:
        self.app = app
        self._apis = apis

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else Headers()
        encoding = headers.get("content-encoding", "identity").strip().lower()
        if encoding in ("identity", "") or scope["method"] in ("GET", "HEAD"):  # no body
            await self.app(scope, receive, send)
            return
        if encoding not in _WINDOW_BITS:
            message = f"a body may be encoded as gzip or deflate, not as {encoding[:40]!r}"
            error = ApiError(415, message, code="content_encoding")
            await refuse(scope, send, self._apis, error)
            return
        # Content-Length counts the compressed bytes.
        scope["headers"] = [pair for pair in scope["headers"] if pair[0] != b"content-length"]
        await self.app(scope, _Decoder(receive, _WINDOW_BITS[encoding]).receive, send)


class _Decoder:
    def __init__(self, receive: Receive, window_bits: int) -> None:
        self._receive = receive
        self._stream = zlib.decompressobj(window_bits)
        self._rest = b""  # bytes received but not yet decompressed
        self._more = True  # more bytes will come

    async def receive(self) -> Message:
        """ASGI's `receive`. Raises ApiError 400."""
        if not self._rest and self._more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            self._rest, self._more = message.get("body", b""), message.get("more_body", False)
        elif not self._rest and self._stream.eof:
            return await self._receive()
        try:
            body = self._stream.decompress(self._rest, PIECE_BYTES)
        except zlib.error as error:
            raise ApiError(
                400,
                f"the body is not encoded as its header says: {error}; correct the body or its "
                "Content-Encoding",
                code="content_encoding",
            ) from error
        if self._stream.unused_data:  # zlib would keep all bytes after the stream's end
            raise ApiError(
                400,
                "bytes follow the end of the encoded body; correct the body or its Content-Encoding",
                code="content_encoding",
            )
        self._rest = self._stream.unconsumed_tail
        if not (self._rest or self._more or self._stream.eof or len(body) == PIECE_BYTES):
            raise ApiError(
                400,
                "the encoded body ends too early; correct the body or its Content-Encoding",
                code="content_encoding",
            )
        more = bool(self._rest) or self._more or (len(body) == PIECE_BYTES and not self._stream.eof)
        return {"type": "http.request", "body": body, "more_body": more}
