"""/v1/files and /v1/batches with OpenAI's own client, against the real process and a scripted engine."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from moeserve.messages.schema import BACKGROUND_PRIORITY
from tests.httpserver.batches.batch_files import (
    CHAT,
    client_of,
    completed,
    create,
    ended,
    jsonl,
    line,
    refused,
    results,
)
from tests.support.servers.http_harness import NAME, HttpServer, echo, http_server, silence
from tests.support.servers.waiting import within

if TYPE_CHECKING:
    import openai


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with http_server(batch_dir=str(tmp_path_factory.mktemp("batches") / "private")) as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    shared.begin_anew()
    return shared


@pytest.fixture
def client(server: HttpServer) -> openai.OpenAI:
    return client_of(server)


def test_a_batch_is_answered_line_by_line(server: HttpServer, client: openai.OpenAI) -> None:
    lines = [line(f"request-{i}", messages=[{"role": "user", "content": f"Say {i}"}]) for i in range(20)]
    lines.append(line("too-long", max_tokens=100_000))
    batch = create(client, jsonl(lines), metadata={"job": "nightly"})
    assert batch.status == "validating"
    assert batch.metadata == {"job": "nightly"}
    done = ended(client, batch.id)
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (
        21,
        20,
        1,
    )
    assert done.completed_at >= done.in_progress_at >= done.created_at
    found = results(client, done.output_file_id)
    assert {one["custom_id"] for one in found} == {f"request-{i}" for i in range(20)}
    assert len({one["id"] for one in found}) == 20
    import openai

    for one in found:
        assert one.keys() == {"id", "custom_id", "response", "error"}
        assert one["error"] is None
        assert one["response"].keys() == {"status_code", "request_id", "body"}
        assert one["response"]["status_code"] == 200
        openai.types.chat.ChatCompletion.model_validate(one["response"]["body"])
    (failed,) = results(client, done.error_file_id)
    assert failed["custom_id"] == "too-long"
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert {request.priority for request in server.requests} == {BACKGROUND_PRIORITY}
    output = client.files.retrieve(done.output_file_id)
    assert output.purpose == "batch_output"


@pytest.mark.parametrize("endpoint", ["/v1/completions", "/v1/responses"])
def test_other_endpoints(client: openai.OpenAI, endpoint: Any) -> None:
    body = {"prompt": "Once"} if endpoint == "/v1/completions" else {"input": "Once"}
    asked = {"custom_id": "a", "method": "POST", "url": endpoint, "body": {"model": NAME, **body}}
    done = ended(client, create(client, jsonl([asked]), endpoint).id)
    (found,) = results(client, done.output_file_id)
    assert found["response"]["body"]["object"] == ("text_completion" if "prompt" in body else "response")


def test_files_come_and_go(client: openai.OpenAI) -> None:
    data = jsonl([line("a")]) * 1000
    file = client.files.create(
        file=("../../etc/passwd", data),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.bytes == len(data)
    assert file.expires_at == file.created_at + 3600
    assert client.files.content(file.id).content == data
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with refused(404):
            call(file.id)


def test_lists_have_pages(client: openai.OpenAI) -> None:
    made = [create(client, jsonl([line("a")])).id for _ in range(5)]
    first = client.batches.list(limit=2)
    assert len(first.data) == 2
    assert first.has_more
    found = [batch.id for batch in client.batches.list(limit=2)]  # all pages
    assert set(made) <= set(found)
    assert len(found) == len(set(found))


# What people send, by public reports about batches of OpenAI, Azure, vLLM, SGLang, LiteLLM and Instructor.
GOOD: dict[str, bytes] = {
    "a byte order mark": b"\xef\xbb\xbf" + jsonl([line("a")]),
    "CRLF": jsonl([line("a"), line("b")]).replace(b"\n", b"\r\n"),
    "blank lines": b"\n" + jsonl([line("a")]) + b"   \n\n" + jsonl([line("b")]) + b"\n",
    "no end of the last line": jsonl([line("a"), line("b")]).rstrip(b"\n"),
    "Azure's url": jsonl([line("a", "/chat/completions")]),
    "a whole url": jsonl([line("a", "https://api.openai.com/v1/chat/completions")]),
    "no method": jsonl([{k: v for k, v in line("a").items() if k != "method"}]),
    "line separators in a text": json.dumps(line("a", user="x\u2028y\x85z"), ensure_ascii=False).encode(),
}
BAD: dict[str, tuple[bytes, str, int | None]] = {
    "an empty file": (b"", "empty_file", None),
    "nothing but blank lines": (b"\n\n", "empty_file", None),
    "a list": (json.dumps([line("a"), line("b")]).encode(), "invalid_json_line", 1),
    "indented JSON": (json.dumps(line("a"), indent=2).encode(), "invalid_json_line", 1),
    "a broken line": (jsonl([line("a")]) + b'{"custom_id": "b", \n', "invalid_json_line", 2),
    "UTF-16": (jsonl([line("a")]).decode().encode("utf-16"), "invalid_json_line", 1),
    "a duplicate": (jsonl([line("a"), line("b"), line("a")]), "duplicate_custom_id", 3),
    "no custom_id": (
        jsonl([{k: v for k, v in line("a").items() if k != "custom_id"}]),
        "missing_required_parameter",
        1,
    ),
    "a number for custom_id": (jsonl([line("a") | {"custom_id": 7}]), "invalid_type", 1),
    "no body (Instructor's params)": (
        jsonl([{"custom_id": "a", "params": {}}]),
        "missing_required_parameter",
        1,
    ),
    "another endpoint": (jsonl([line("a"), line("b", "/v1/embeddings")]), "url_mismatch", 2),
    "another model": (jsonl([line("a", model="gpt-4o-mini")]), "model_not_found", 1),
    "GET": (jsonl([line("a") | {"method": "GET"}]), "invalid_method", 1),
}


@pytest.mark.parametrize("name", GOOD)
def test_shapes_that_are_taken(client: openai.OpenAI, name: str) -> None:
    done = ended(client, create(client, GOOD[name]).id)
    assert done.status == "completed", done.errors
    found = results(client, done.output_file_id)
    assert len(found) == done.request_counts.total == GOOD[name].count(b"custom_id")


@pytest.mark.parametrize("name", BAD)
def test_shapes_that_are_refused_by_line(server: HttpServer, client: openai.OpenAI, name: str) -> None:
    data, code, at = BAD[name]
    done = ended(client, create(client, data).id)
    assert done.status == "failed"
    assert (done.errors.data[0].code, done.errors.data[0].line) == (code, at)
    assert done.errors.data[0].message
    assert not server.requests, "a file is checked whole before any line is answered"


def test_a_stream_in_a_batch_is_that_lines_error(client: openai.OpenAI) -> None:
    done = ended(client, create(client, jsonl([line("a", stream=True), line("b")])).id)
    (failed,) = results(client, done.error_file_id)
    assert failed["custom_id"] == "a"
    assert "not streamed" in failed["response"]["body"]["error"]["message"]


def test_a_cancelled_batch_keeps_its_results(server: HttpServer, client: openai.OpenAI) -> None:
    answered = 0

    def some(server: HttpServer, request: Any) -> None:
        nonlocal answered
        answered += 1
        (echo if answered <= 3 else silence)(server, request)

    server.answer = some
    batch = create(client, jsonl([line(f"{i}") for i in range(50)]))
    assert within(30, lambda: completed(client, batch.id) == 3)
    with refused(409):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    done = ended(client, batch.id)
    assert done.status == "cancelled"
    assert len(results(client, done.output_file_id)) == 3
    given_up = results(client, done.error_file_id)
    assert len(given_up) == 47
    assert {one["error"]["code"] for one in given_up} == {"batch_cancelled"}
    assert within(30, lambda: len(server.aborted) > 0), "answers under way are ended"
    with refused(409):
        client.batches.cancel(batch.id)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({}, "purpose"),
    ],
)
def test_uploads_that_are_refused(server: HttpServer, fields: dict[str, str], words: str) -> None:
    answer = httpx.post(f"{server.url}/v1/files", data=fields, files={"file": b"{}\n"})
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]


def test_bodies_that_are_no_uploads(server: HttpServer) -> None:
    url = f"{server.url}/v1/files"
    assert httpx.post(url, json={"file": "x"}).status_code == 415
    boundary = {"content-type": "multipart/form-data; boundary=b"}
    cut = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nxyz'
    assert "last boundary" in httpx.post(url, content=cut, headers=boundary).json()["error"]["message"]
    assert httpx.post(url, data={"purpose": "batch"}, files={"other": b"x"}).status_code == 400
    folder = Path(server.config["batch_dir"])
    assert within(10, lambda: not list((folder / "uploads").iterdir())), "nothing is left of them"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"endpoint": "/v1/embeddings"}, "must be one of /v1/chat/completions"),
        ({"completion_window": "90d"}, "14 days"),
        ({"completion_window": "soon"}, "14 days"),
        ({"input_file_id": "file-../../x"}, "there is no file"),
    ],
)
def test_batches_that_are_refused(
    server: HttpServer, client: openai.OpenAI, fields: dict[str, str], words: str
) -> None:
    file = client.files.create(file=("a", jsonl([line("a")])), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"} | fields
    answer = server.post("/v1/batches", body)
    assert answer.status_code in (400, 404)
    assert words in answer.json()["error"]["message"]


def test_the_folder_is_private(server: HttpServer, client: openai.OpenAI) -> None:
    ended(client, create(client, jsonl([line("a")])).id)
    folder = Path(server.config["batch_dir"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.rglob("*"):
        assert stat.S_IMODE(os.stat(path).st_mode) in (0o600, 0o700), path


def test_metrics_count_requests(server: HttpServer, client: openai.OpenAI) -> None:
    answered = f'moeserve:batch_requests_total{{model_name="{NAME}",outcome="succeeded"}}'
    before = server.metrics()[answered]
    first_tokens = server.metric("time_to_first_token_seconds_count")
    ended(client, create(client, jsonl([line("a"), line("b")])).id)
    assert server.metrics()[answered] == before + 2
    assert server.metric("time_to_first_token_seconds_count") == first_tokens, "they say nothing of latency"


def test_without_the_flag_the_paths_say_so() -> None:
    with http_server() as server:
        for path in ("/v1/files", "/v1/batches", "/v1/messages/batches"):
            answer = server.get(path)
            assert answer.status_code == 404
            assert "--batch-dir" in answer.json()["error"]["message"]
