"""/v1/responses in the background, with OpenAI's own client against the real process and a scripted engine."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moeserve.httpserver.responses import background
from moeserve.httpserver.responses.kept_events import EventMemory
from moeserve.httpserver.responses.store import ResponseStore
from moeserve.httpserver.transport.errors import ApiError
from moeserve.messages.schema import GenerateRequest, TextItem, TextOut, Usage
from tests.support.clients.official_clients import openai_client
from tests.support.servers.http_harness import NAME, HttpServer, http_server, say, silence
from tests.support.servers.waiting import within

if TYPE_CHECKING:
    from openai import OpenAI

MANY = 20  # pieces of an answer


@pytest.fixture(autouse=True)
def _as_new(server: HttpServer) -> Iterator[None]:
    server.begin_anew()
    yield
    server.begin_anew()


@pytest.fixture(scope="module")
def openai(server: HttpServer) -> OpenAI:
    return openai_client(server.url)


def begin(server: HttpServer, request: GenerateRequest) -> None:
    """An answer's first token; `go_on` says the rest."""
    server.send(TextOut([TextItem(request.id, "Once", server.tokenizer.encode("x")[:1])]))


def go_on(server: HttpServer) -> None:
    (request,) = server.requests
    for number in range(MANY):
        server.send(TextOut([TextItem(request.id, f" {number}", server.tokenizer.encode("x")[:1])]))
    end = TextItem(request.id, "", [], finish_reason="stop", usage=Usage(3, MANY + 1, 0, 1.0, 2.0, 4.0))
    server.send(TextOut([end]))


WHOLE = "Once" + "".join(f" {number}" for number in range(MANY))


def create(openai: OpenAI, **fields: Any) -> Any:
    return openai.responses.create(model=NAME, input="Tell me a story", background=True, **fields)


def polled(openai: OpenAI, response_id: str, status: str) -> Any:
    assert within(30, lambda: openai.responses.retrieve(response_id).status == status)
    return openai.responses.retrieve(response_id)


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def test_a_response_is_made_while_nobody_is_connected(server: HttpServer, openai: OpenAI) -> None:
    server.answer = silence
    response = create(openai, metadata={"job": "1"})
    assert (response.status, response.background, response.output) == ("queued", True, [])
    assert within(30, lambda: len(server.requests) == 1)
    assert openai.responses.retrieve(response.id).status == "queued"
    begin(server, server.requests[0])
    polled(openai, response.id, "in_progress")
    assert server.aborted == []
    go_on(server)
    done = polled(openai, response.id, "completed")
    assert done.output_text == WHOLE
    assert done.metadata == {"job": "1"}
    assert done.usage.output_tokens == MANY + 1
    server.answer = say("The end.")
    following = openai.responses.create(model=NAME, input="And then?", previous_response_id=response.id)
    assert following.output_text == "The end."
    assert [item.type for item in openai.responses.input_items.list(response.id).data] == ["message"]


def test_a_stream_goes_on_where_it_was_cut(server: HttpServer, openai: OpenAI) -> None:
    server.answer = begin
    seen = []
    with create(openai, stream=True) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    assert [event.type for event in seen[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    response_id = seen[0].response.id
    go_on(server)
    polled(openai, response_id, "completed")
    rest = list(openai.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
    numbers = [event.sequence_number for event in [*seen, *rest]]
    assert numbers == list(range(len(numbers)))
    assert text_of([*seen, *rest]) == WHOLE
    assert rest[-1].type == "response.completed"
    again = list(openai.responses.retrieve(response_id, stream=True))
    assert [event.sequence_number for event in again] == numbers
    with openai.responses.stream(response_id=response_id, starting_after=numbers[-3]) as helper:
        assert [event.type for event in helper][-1] == "response.completed"


def test_two_readers_follow_a_response_while_it_is_made(server: HttpServer, openai: OpenAI) -> None:
    server.answer = begin
    response = create(openai)
    with (
        openai.responses.retrieve(response.id, stream=True) as first,
        openai.responses.retrieve(response.id, stream=True, starting_after=1) as second,
    ):
        go_on(server)
        texts = [text_of(list(one)) for one in (first, second)]
    assert texts == [WHOLE, WHOLE]


def test_a_client_that_leaves_at_once_leaves_no_response_queued(server: HttpServer, openai: OpenAI) -> None:
    """As was reported of OpenAI's: a stream that is cut at its first event."""
    with create(openai, stream=True, max_output_tokens=3) as stream:
        response_id = next(iter(stream)).response.id
    assert within(30, lambda: openai.responses.retrieve(response_id).status == "incomplete")


def test_cancel(server: HttpServer, openai: OpenAI) -> None:
    import openai as errors

    server.answer = begin
    response = create(openai)
    polled(openai, response.id, "in_progress")
    with openai.responses.retrieve(response.id, stream=True) as stream:
        cancelled = openai.responses.cancel(response.id)
        assert cancelled.status == "cancelled"
        assert cancelled.output_text == "Once"
        last: Any = list(stream)[-1]
        assert last.type == "response.cancelled"
    assert within(30, lambda: server.aborted == [server.requests[0].id])
    assert openai.responses.cancel(response.id).status == "cancelled"
    assert openai.responses.retrieve(response.id).status == "cancelled"
    server.answer = say("Done.")
    whole = openai.responses.create(model=NAME, input="Hello")
    with pytest.raises(errors.BadRequestError, match="only background responses can be cancelled"):
        openai.responses.cancel(whole.id)
    with pytest.raises(errors.NotFoundError):
        openai.responses.cancel("resp_none")


def test_deleting_ends_it(server: HttpServer, openai: OpenAI) -> None:
    import openai as errors

    server.answer = begin
    response = create(openai)
    polled(openai, response.id, "in_progress")
    openai.responses.delete(response.id)
    assert within(30, lambda: server.aborted == [server.requests[0].id])
    for call in (openai.responses.retrieve, openai.responses.cancel, openai.responses.delete):
        with pytest.raises(errors.NotFoundError):
            call(response.id)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"store": False}, "needs store true"),
        ({"max_output_tokens": 100_000}, "context"),
        ({"previous_response_id": "resp_none"}, "no stored response"),
    ],
)
def test_what_is_wrong_is_said_at_once(openai: OpenAI, fields: dict[str, Any], words: str) -> None:
    import openai as errors

    with pytest.raises(errors.APIStatusError, match=words):
        create(openai, **fields)


def test_a_failure_is_in_the_response(server: HttpServer, openai: OpenAI) -> None:
    from moeserve.messages.schema import RequestError

    def fail(server: HttpServer, request: GenerateRequest) -> None:
        server.send(RequestError(request.id, 500, "the engine had no luck"))

    server.answer = fail
    response = create(openai)
    failed = polled(openai, response.id, "failed")
    assert failed.error.message == "the engine had no luck"
    last = list(openai.responses.retrieve(response.id, stream=True))[-1]
    assert last.type == "response.failed"


def test_a_response_that_has_not_ended_is_not_built_on(server: HttpServer, openai: OpenAI) -> None:
    import openai as errors

    server.answer = begin
    response = create(openai)
    with pytest.raises(errors.BadRequestError, match="has not ended yet"):
        openai.responses.create(model=NAME, input="x", previous_response_id=response.id)
    openai.responses.cancel(response.id)


@pytest.mark.parametrize(
    "query",
    ["stream=1", "stream=true&starting_after=-1", "stream=true&starting_after=x", "limit=3"],
)
def test_queries_are_checked(server: HttpServer, openai: OpenAI, query: str) -> None:
    response = create(openai, max_output_tokens=1)
    assert server.get(f"/v1/responses/{response.id}?{query}").status_code == 400


def test_a_key_has_its_own_and_a_bound() -> None:
    import openai as errors

    with http_server(api_key=["one", "two"]) as server:
        server.answer = silence
        one, two = (openai_client(server.url, api_key=key) for key in ("one", "two"))
        response = create(one)
        for call in (two.responses.retrieve, two.responses.cancel, two.responses.delete):
            with pytest.raises(errors.NotFoundError):
                call(response.id)
        made = [create(one) for _ in range(background.MAX_RUNS_OF_KEY - 1)]
        with pytest.raises(errors.RateLimitError, match="64 background responses of this API key"):
            create(one)
        create(two)
        one.responses.cancel(made[0].id)
        create(one)


def test_a_server_that_ends_leaves_word(tmp_path: Path) -> None:
    with http_server(data_dir=str(tmp_path)) as server:
        openai = openai_client(server.url)
        server.answer = begin
        response = create(openai)
        polled(openai, response.id, "in_progress")
        server.start_again()
        server.engine_ready()
        openai = openai_client(server.url)
        found = openai.responses.retrieve(response.id)
        assert found.status == "failed"
        assert found.error is not None
        assert "the server ended before this response did" in found.error.message
        assert openai.responses.cancel(response.id).status == "failed"
        refused = server.get(f"/v1/responses/{response.id}?stream=true")
        assert refused.status_code == 400
        assert "not kept any more" in refused.text


def test_a_drain_waits_for_it(tmp_path: Path) -> None:
    with http_server(data_dir=str(tmp_path)) as server:
        openai = openai_client(server.url)
        server.answer = begin
        response = create(openai)
        polled(openai, response.id, "in_progress")
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        go_on(server)
        server.process.wait(30)
    store = ResponseStore(tmp_path)
    kept = asyncio.run(store.get("", response.id)).response
    store.close()
    assert kept["status"] == "completed"


def test_events_have_a_bound_and_those_of_ended_responses_go_first() -> None:
    async def run() -> None:
        memory = EventMemory(3000)
        kept = [memory.open() for _ in range(3)]
        for number in range(15):
            if number == 6:
                kept[1].end()
            delta: Any = {
                "type": "response.output_text.delta",
                "sequence_number": number // 3,
                "delta": "x" * 100,
            }
            memory.add(kept[number % 3], delta)
            assert sum(one.size for one in kept) <= 3000
        assert [one.size > 0 for one in kept] == [True, False, True]
        with pytest.raises(ApiError, match="not kept any more"):
            await anext(kept[1].after(-1))
        following = asyncio.create_task(anext(kept[0].after(4)))
        await asyncio.sleep(0)
        memory.close(kept[0])
        with pytest.raises(ApiError, match="not kept any more"):
            await following

    asyncio.run(run())
