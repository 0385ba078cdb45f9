"""Reads the model that a request is for, and the form of its answer, without parsing the whole body.

The model's own server reads the body again, with all its checks."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl

import msgspec

from moeserve.httpserver.ollama.bodies import served_name
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.lone_surrogates import mend

OLLAMA: Final = "/api/"  # paths that begin so are Ollama's
STREAM_PATH: Final = "/generate_stream"  # LightLLM's, whose answers are always streams
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"([0-9]*\.?[0-9]+)(ns|us|µs|ms|s|m|h)")
FOREVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Asked:
    model: str | None = None  # None: the server's first model
    streams_events: bool = False  # the answer is a stream of server-sent events
    streams_lines: bool = False  # the answer is a stream of lines of JSON
    keep_alive: float | None = None  # Ollama's keep_alive in seconds; inf: for ever
    only_loads: bool = (
        False  # Ollama's request without a prompt: it loads the model or, with keep_alive 0, unloads it
    )


class _Body(msgspec.Struct, gc=False):
    """The fields that the front needs. Others are skipped."""

    model: str | None = None
    name: msgspec.Raw = msgspec.Raw()  # the field's old name in Ollama's API
    stream: msgspec.Raw = msgspec.Raw()
    keep_alive: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


_DECODER: Final = msgspec.json.Decoder(_Body)


async def asked_in(path: str, query: bytes, body: bytes) -> Asked:
    """Returns the requested model and the form of the answer. An empty body names no model, but the query may. Raises
    ApiError 400 for a body that is not a JSON object."""
    if not body.strip():
        return Asked(_in_query(query))
    try:
        found = await _decoded(body)
    except msgspec.ValidationError as error:
        if "$.model" in str(error):
            raise ApiError(400, "model: must be a string", param="model", code="invalid_value") from error
        raise ApiError(400, "the body must be a JSON object", code="invalid_json") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not path.startswith(OLLAMA):
        streams = bytes(found.stream) == b"true" or path == STREAM_PATH
        return Asked(found.model or _in_query(query), streams)
    model = found.model or _text(found.name)
    return Asked(
        None if model is None else served_name(model),
        streams_lines=bytes(found.stream) != b"false",  # Ollama's default
        keep_alive=_seconds(bytes(found.keep_alive)),
        only_loads=bytes(found.prompt) in (b"", b'""', b"null") and _is_empty(bytes(found.messages)),
    )


async def _decoded(body: bytes) -> _Body:
    """Raises msgspec.DecodeError, RecursionError and UnicodeDecodeError. Halves of surrogate pairs are no error: the
    model's server replaces them."""
    try:
        return _DECODER.decode(body)
    except msgspec.ValidationError:
        raise
    except msgspec.DecodeError:
        text = body.decode()
        mended = await mend(text)
        if mended is text:
            raise
        return _DECODER.decode(mended)


def _in_query(query: bytes) -> str | None:
    """Returns the model that the query names; llama-server's clients name it there."""
    return dict(parse_qsl(query.decode("latin-1"), max_num_fields=64)).get("model")


def _text(raw: msgspec.Raw) -> str | None:
    try:
        return msgspec.json.decode(raw, type=str | None) if bytes(raw) else None
    except msgspec.DecodeError:
        return None


def _is_empty(raw: bytes) -> bool:
    return raw in (b"", b"null") or (raw.startswith(b"[") and not raw[1:-1].strip())


def _seconds(raw: bytes) -> float | None:
    """Returns Ollama's duration in seconds: a number, or a text such as 5m or 1h30m. A negative one gives inf (for
    ever)."""
    if raw in (b"", b"null"):
        return None
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return FOREVER if value < 0 else float(value)
    if not isinstance(value, str):
        return None
    text = value.strip()
    if text.lstrip("+-").isdecimal():
        return FOREVER if text.startswith("-") else float(text)
    parts = _DURATION.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text.lstrip("+-"):
        return None
    return FOREVER if text.startswith("-") else sum(float(number) * _UNITS[unit] for number, unit in parts)
