"""Batches outlive their server, however it ends; and each API key has its own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.httpserver.batches.batch_files import (
    client_of,
    completed,
    create,
    ended,
    jsonl,
    line,
    refused,
    results,
)
from tests.support.servers.engine_messages import ready_message
from tests.support.servers.http_harness import HttpServer, echo, http_server
from tests.support.servers.waiting import within

if TYPE_CHECKING:
    import openai

LINES = 400


def slowly(server: HttpServer, request: Any) -> None:
    """Answers at once or after up to 30 ms, on other threads."""
    threading.Timer((request.id * 7919 % 31) / 1000, echo, (server, request)).start()


def begin_again(server: HttpServer) -> openai.OpenAI:
    server.start_again()  # SIGKILL
    server.send(ready_message(server.tokenizer.vocabulary.size, context=server.context))
    assert within(30, lambda: server.get("/health").status_code == 200)
    return client_of(server)


def wait_for(client: openai.OpenAI, batch_id: str, done: int) -> None:
    assert within(60, lambda: completed(client, batch_id) >= done)


def test_killed_in_the_middle_each_line_has_one_result(tmp_path: Path) -> None:
    with http_server(batch_dir=str(tmp_path / "b")) as server:
        server.answer = slowly
        client = client_of(server)
        batch = create(client, jsonl([line(f"request-{i}") for i in range(LINES)]))
        for kill in range(1, 4):
            wait_for(client, batch.id, LINES * kill // 5)
            client = begin_again(server)
        end = ended(client, batch.id)
        assert end.status == "completed"
        found = [one["custom_id"] for one in results(client, end.output_file_id)]
        assert sorted(found) == sorted(f"request-{i}" for i in range(LINES))
        assert end.request_counts.completed == LINES
        assert len(server.requests) < 2 * LINES, "what was done was not done again"


def test_the_counts_are_those_of_before_while_the_model_is_loaded(tmp_path: Path) -> None:
    """The batch goes on only when the engine is ready: until then its answered lines count, too."""
    with http_server(batch_dir=str(tmp_path / "b")) as server:
        answered = threading.Semaphore(5)

        def first_ones(server: HttpServer, request: Any) -> None:
            if answered.acquire(blocking=False):
                echo(server, request)

        server.answer = first_ones
        client = client_of(server)
        batch = create(client, jsonl([line(f"{i}") for i in range(8)]))
        wait_for(client, batch.id, 5)
        server.start_again()  # SIGKILL; no engine is ready
        client = client_of(server)
        assert within(30, lambda: server.get(f"/v1/batches/{batch.id}").status_code == 200)
        assert completed(client, batch.id) == 5
        server.answer = echo
        server.send(ready_message(server.tokenizer.vocabulary.size, context=server.context))
        end = ended(client, batch.id)
        assert (end.request_counts.completed, len(results(client, end.output_file_id))) == (8, 8)


def test_half_a_line_is_cut_off_and_answered_again(tmp_path: Path) -> None:
    with http_server(batch_dir=str(tmp_path / "b")) as server:
        seen = 0

        def first_ones(server: HttpServer, request: Any) -> None:
            nonlocal seen
            seen += 1
            if seen <= 3:
                echo(server, request)

        server.answer = first_ones
        client = client_of(server)
        batch = create(client, jsonl([line(f"{i}") for i in range(8)]))
        assert within(30, lambda: completed(client, batch.id) == 3)
        server.process.kill()
        server.process.wait(30)
        journal = tmp_path / "b" / "batches" / f"{batch.id}.output"
        whole = journal.read_bytes()
        journal.write_bytes(whole[:-20])  # what a crash leaves of the last line
        server.answer = echo
        client = begin_again(server)
        end = ended(client, batch.id)
        found = [one["custom_id"] for one in results(client, end.output_file_id)]
        assert sorted(found) == sorted(f"{i}" for i in range(8))


def test_a_stopped_server_leaves_its_batches_to_the_next_at_once(tmp_path: Path) -> None:
    with http_server(batch_dir=str(tmp_path / "b"), shutdown_timeout=60.0) as server:
        server.answer = lambda server, request: None
        client = client_of(server)
        batch = create(client, jsonl([line(f"{i}") for i in range(5)]))
        assert within(30, lambda: len(server.requests) == 5)
        server.terminate()
        server.process.wait(30)  # half of the drain's limit, until which it would wait for the lines
        server.answer = echo
        client = begin_again(server)
        assert ended(client, batch.id).request_counts.completed == 5


def test_an_expired_batch_tells_its_rest(tmp_path: Path) -> None:
    with http_server(batch_dir=str(tmp_path / "b")) as server:
        server.answer = lambda server, request: None
        client = client_of(server)
        batch = create(client, jsonl([line("a"), line("b")]), window="1h")
        assert within(30, lambda: len(server.requests) == 2)
        server.process.kill()
        server.process.wait(30)
        record = tmp_path / "b" / "batches" / f"{batch.id}.json"
        record.write_text(record.read_text().replace(str(batch.expires_at), str(batch.created_at)))
        client = begin_again(server)
        end = ended(client, batch.id)
        assert end.status == "expired"
        given_up = results(client, end.error_file_id)
        assert {one["custom_id"] for one in given_up} == {"a", "b"}
        assert {one["error"]["code"] for one in given_up} == {"batch_expired"}


def test_a_key_sees_its_own_alone(tmp_path: Path) -> None:
    with http_server(batch_dir=str(tmp_path / "b"), api_key=("one", "two")) as server:
        mine, other = client_of(server, "one"), client_of(server, "two")
        batch = create(mine, jsonl([line("a")]))
        end = ended(mine, batch.id)
        assert [request.key_name for request in server.requests] == ["key-1"]
        assert not list(other.files.list())
        assert not list(other.batches.list())
        for file_id in (batch.input_file_id, end.output_file_id):
            with refused(404):
                other.files.content(file_id)
            with refused(404):
                other.files.delete(file_id)
        with refused(404):
            other.batches.retrieve(batch.id)
        with refused(404):
            other.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            )


def test_a_key_fills_its_share_of_the_room(tmp_path: Path) -> None:
    with http_server(batch_dir=str(tmp_path / "b"), batch_dir_gib=0.001, api_key=("one", "two")) as server:
        mine, other = client_of(server, "one"), client_of(server, "two")
        mine.files.create(file=("a", b"x" * 400_000), purpose="batch")
        with refused(413, "delete some"):
            mine.files.create(file=("a", b"x" * 400_000), purpose="batch")
        other.files.create(file=("a", b"x" * 300_000), purpose="batch")


def test_two_keys_take_turns(tmp_path: Path) -> None:
    """The second key's small batch does not wait for the first one's large one."""
    with http_server(batch_dir=str(tmp_path / "b"), api_key=("one", "two"), max_num_seqs=4) as server:
        server.answer = slowly
        first, second = client_of(server, "one"), client_of(server, "two")
        large = create(first, jsonl([line(f"{i}") for i in range(300)]))
        assert within(30, lambda: first.batches.retrieve(large.id).status == "in_progress")
        small = create(second, jsonl([line(f"{i}") for i in range(10)]))
        assert ended(second, small.id).request_counts.completed == 10
        assert first.batches.retrieve(large.id).status == "in_progress"
