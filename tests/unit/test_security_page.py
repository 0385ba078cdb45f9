"""The bounds in the tables of docs/reference/security.md and security-of-files.md are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moeserve.grammar import check_process, checker
from moeserve.httpserver.batches import input_lines, message_batch_input
from moeserve.httpserver.batches import store as batch_store
from moeserve.httpserver.documents import pdf_process, pdf_protocol, pdf_reader
from moeserve.httpserver.generation.chat import pdf_texts
from moeserve.httpserver.generation.engine import open_generations
from moeserve.httpserver.generation.resolve import request_builder
from moeserve.httpserver.responses import background, kept_events, store
from moeserve.httpserver.transport import (
    bounded_config,
    connection,
    middleware,
    request_model,
    sliced_connection,
    sse,
    turns,
)
from moeserve.messages.pictures import MOST_FRAMES, MOST_PICTURES
from moeserve.processes.sandbox.parent import PATIENCE
from moeserve.remote import frames, gate
from moeserve.tokenizer import render_process, renderer
from moeserve.visualserver import (
    decode_process,
    decode_protocol,
    picture_decoder,
    picture_size,
    video_decoder,
)

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE = "\n".join((REFERENCE / name).read_text() for name in ("security.md", "security-of-files.md"))
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def row(beginning: str) -> str:
    """A table's row without its first cell."""
    (found,) = (line for line in PAGE.splitlines() if line.startswith(f"| {beginning}"))
    return found.partition(" | ")[2]


@pytest.mark.parametrize(
    ("beginning", "says"),
    [
        (
            "request line and headers",
            f"{connection.MAX_HEAD_BYTES // KIB} KiB, {connection.HEAD_TIMEOUT_S:g} s; {connection.MAX_FIELDS} header "
            f"lines; {connection.MAX_TARGET_BYTES // KIB} KiB of path and query ",
        ),
        (
            "body |",
            f"{middleware.BODY_BYTES_PER_TOKEN} bytes for each token of context, from "
            f"{middleware.MIN_BODY_LIMIT // MIB} to {middleware.MAX_BODY_BYTES // MIB} MiB "
            f"({middleware.MAX_BODY_BYTES // MIB} with `--mmproj`); "
            f"{connection.BODY_TIMEOUT_S:g} s, and {connection.BODY_INTERVAL_BYTES // KIB} KiB in each "
            f"{connection.BODY_INTERVAL_S:g} s ",
        ),
        (
            "an uploaded file",
            f"{batch_store.MAX_FILE_BYTES // MIB} MiB; {message_batch_input.MAX_BATCH_BYTES // MIB} MiB ",
        ),
        (
            "requests of a batch;",
            f"{input_lines.MAX_LINES:,}; {input_lines.MAX_LINE_BYTES // MIB} MiB; "
            f"{batch_store.MAX_OPEN_BATCHES_PER_OWNER}; {batch_store.MAX_FILES_PER_OWNER:,} ",
        ),
        ("pixels of a picture", f"{decode_protocol.MOST_PIXELS:,}; {decode_protocol.MOST_VIDEO_PIXELS:,} "),
        ("pages of a PDF", f"{pdf_protocol.MAX_PAGES:,}; {pdf_protocol.MAX_TEXT_BYTES // MIB} MiB "),
        ("CPU seconds for a PDF", f"{pdf_reader.TIMEOUT_S:g} s "),
        ("memory for a PDF", f"{pdf_process.MEMORY_BYTES // MIB:,} MiB "),
        ("PDFs of a conversation", f"{pdf_texts.MOST_PDFS}; "),
        ("texts that are kept", f"{pdf_reader.CACHE_BYTES // MIB} MiB "),
        ("its longer side", f"{picture_size.MOST_ASPECT} times its shorter side "),
        ("seconds of CPU time", f"{picture_decoder.TIMEOUT_S:g} s; {video_decoder.VIDEO_TIMEOUT_S:g} s "),
        (
            "memory to decode one",
            f"{decode_process.MEMORY_BYTES // MIB} MiB; {decode_protocol.VIDEO_MEMORY_BYTES // MIB:,} MiB ",
        ),
        (
            "length of a video",
            f"{decode_protocol.MOST_VIDEO_SECONDS:,.0f} s; {decode_protocol.MOST_CODED_FRAMES:,}; "
            f"{MOST_FRAMES} ",
        ),
        ("pictures of a request", f"{MOST_PICTURES} "),
        (
            "chunk heads, extensions and trailers",
            f"{connection.MAX_HEAD_BYTES // KIB} KiB between two pieces, "
            f"{connection.MAX_FRAMING_BYTES // MIB} MiB in all; {connection.MAX_FIELDS} trailers ",
        ),
        (
            "bytes after a refusal that did not wait for the body",
            f"{sliced_connection.LINGER_BYTES // MIB} MiB, {sliced_connection.LINGER_S:g} s ",
        ),
        ("the event loop's time for requests without a key", f"{turns.SHARE:.0%}, "),
        ("bodies of all requests", f"{middleware.MAX_BODIES_BYTES // MIB} MiB;"),
        ("connections |", f"+ {bounded_config.SPARE_CONNECTIONS} "),
        ("a connection that is kept alive", f"{bounded_config.KEEP_ALIVE_S} s "),
        ("connections of one client address", f"by default {bounded_config.SPARE_CONNECTIONS // 2} fewer "),
        ("open requests of one API key", f"by default {bounded_config.SPARE_CONNECTIONS} fewer "),
        ("grammar, stop strings and biases", f"{request_builder.MAX_CONSTRAINT_BYTES // MIB} MiB "),
        ("grammars of all requests", f"{open_generations.MAX_CONSTRAINT_BYTES // MIB} MiB "),
        ("`echo` with `logprobs`", f"{request_builder.MAX_PROMPT_LOGPROBS:,} "),
        (
            "an object's fields",
            f"{request_model.MAX_FIELDS}; {request_model.MAX_VALUES:,}; {request_model.MAX_DEPTH} (schemas "
            f"{request_model.MAX_SCHEMA_DEPTH}) ",
        ),
        ("a client that does not read", f"{sse.SEND_TIMEOUT_S:g} s "),
        (
            "stored responses",
            f"{store.MAX_MEMORY_BYTES // MIB} MiB in memory, {store.MAX_FILE_BYTES // GIB} GiB with `--data-dir`, "
            f"{store.RETENTION_S / 86400:g} days ",
        ),
        (
            "background responses that have not ended",
            f"{background.MAX_RUNS}; {background.MAX_RUNS_OF_KEY} ",
        ),
        (
            "events of background responses",
            f"{kept_events.EVENT_BYTES // MIB} MiB, {background.KEPT_S // 60:.0f} minutes ",
        ),
        ("the responses that one response builds on", f"{store.MAX_CHAIN_BYTES // MIB} MiB "),
        (
            "CPU time",
            f"{renderer.TIMEOUT_S:g} s | {checker.TIMEOUT_S:g} s, of which {check_process.MAX_CPU_S:g} s to compile ",
        ),
        (
            "time by the clock",
            f"{PATIENCE * renderer.TIMEOUT_S:g} s | {PATIENCE * checker.TIMEOUT_S:g} s ",
        ),
        (
            "memory beyond",
            f"{render_process.MEMORY_BYTES // MIB} MiB | {check_process.MEMORY_BYTES // GIB} GiB ",
        ),
    ],
)
def test_bounds_are_those_of_the_code(beginning: str, says: str) -> None:
    assert says in row(beginning)


def test_bounds_of_a_remote_worker_are_those_of_the_code() -> None:
    numbers = {
        number for part in PAGE.split("\n\n") if "handshake" in part for number in re.findall(r"\d+", part)
    }
    assert f"{gate.HANDSHAKE_S:g}" in numbers
    assert f"{gate.MOST_HANDSHAKES}" in numbers
    assert f"{frames.MOST_BYTES[frames.Kind.DATA] // KIB}" in numbers
