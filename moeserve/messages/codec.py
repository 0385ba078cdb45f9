"""Encodes messages as msgpack and decodes them, validated against the schema: no pickle on any socket.

There is one decoder for each receiver, of the union that it may receive. The encoder has no state and is shared.
"""

from __future__ import annotations

from typing import Any, Final, Generic, TypeVar

import msgspec

from moeserve.messages import adapters, schema, steps

T = TypeVar("T")


class CodecError(ValueError):
    """Bytes that are not a message of the expected union, or a message that msgpack cannot represent."""


_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    """Returns the msgpack bytes of a message. Raises CodecError for values that msgpack cannot represent, such as an
    integer beyond 64 bits or a string with a lone surrogate (which JSON input may contain)."""
    try:
        return _ENCODER.encode(message)
    except (msgspec.MsgspecError, OverflowError, UnicodeEncodeError, TypeError, RecursionError) as error:
        raise CodecError(f"cannot encode {type(message).__name__}: {error}") from error


class Decoder(Generic[T]):
    """Decodes the messages of one union, a type that msgspec accepts. May be shared between threads."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def decode(self, frame: bytes | memoryview) -> T:
        """Decodes a message. Raises CodecError if the bytes are malformed or truncated, have an unknown tag or wrong
        types."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CodecError(f"malformed message of {len(frame)} bytes: {error}") from error


TO_ROUTER: Final[Decoder[schema.ToRouter]] = Decoder(schema.ToRouter)
TO_DETOKENIZER: Final[Decoder[schema.ToDetokenizer]] = Decoder(schema.ToDetokenizer)
TO_HTTP: Final[Decoder[schema.ToHttp]] = Decoder(schema.ToHttp)
TO_VISUALSERVER: Final[Decoder[schema.ToVisualServer]] = Decoder(schema.ToVisualServer)
TO_LAUNCHER: Final[Decoder[schema.ToLauncher]] = Decoder(schema.ToLauncher)
FROM_WORKER: Final[Decoder[schema.FromWorker]] = Decoder(schema.FromWorker)
STEP_PLAN: Final[Decoder[steps.StepPlan]] = Decoder(steps.StepPlan)
ADAPTERS_WANTED: Final[Decoder[adapters.AdaptersWanted]] = Decoder(adapters.AdaptersWanted)
