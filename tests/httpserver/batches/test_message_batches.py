"""/v1/messages/batches with Anthropic's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.servers.http_harness import NAME, HttpServer, http_server
from tests.support.servers.waiting import within

if TYPE_CHECKING:
    import anthropic


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
    with http_server(batch_dir=str(tmp_path_factory.mktemp("batches"))) as server:
        yield server


@pytest.fixture
def server(shared: HttpServer) -> HttpServer:
    shared.begin_anew()
    return shared


@pytest.fixture
def client(server: HttpServer) -> anthropic.Anthropic:
    import anthropic

    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


def item(custom_id: str, **params: Any) -> Any:
    asked = {"model": NAME, "max_tokens": 3, "messages": [{"role": "user", "content": "Hello"}]} | params
    return {"custom_id": custom_id, "params": asked}


def ended(client: anthropic.Anthropic, batch_id: str) -> Any:
    assert within(60, lambda: client.messages.batches.retrieve(batch_id).processing_status == "ended")
    return client.messages.batches.retrieve(batch_id)


def test_a_batch_is_answered(client: anthropic.Anthropic) -> None:
    import anthropic

    asked = [item(f"r-{i}") for i in range(10)] + [
        item("wrong", model="claude-0"),
        item("bad", max_tokens=-1),
    ]
    batch = client.messages.batches.create(requests=asked)
    assert batch.processing_status == "in_progress"
    assert batch.request_counts.processing == 12
    done = ended(client, batch.id)
    assert (done.request_counts.succeeded, done.request_counts.errored) == (10, 2)
    found: dict[str, Any] = {one.custom_id: one.result for one in client.messages.batches.results(batch.id)}
    assert len(found) == 12
    assert found["r-0"].type == "succeeded"
    assert found["r-0"].message.usage.output_tokens == 3
    assert found["wrong"].type == "errored"
    assert found["wrong"].error.error.type == "not_found_error"
    assert found["bad"].error.error.type == "invalid_request_error"
    assert batch.id in [one.id for one in client.messages.batches.list()]
    assert client.messages.batches.delete(batch.id).type == "message_batch_deleted"
    with pytest.raises(anthropic.NotFoundError):
        client.messages.batches.retrieve(batch.id)


def test_a_canceled_batch_says_so_of_each_request(server: HttpServer, client: anthropic.Anthropic) -> None:
    import anthropic

    server.answer = lambda server, request: None
    batch = client.messages.batches.create(requests=[item(f"r-{i}") for i in range(30)])
    assert within(30, lambda: len(server.requests) > 0)
    with pytest.raises(anthropic.AnthropicError):
        client.messages.batches.results(batch.id)
    with pytest.raises(anthropic.BadRequestError):
        client.messages.batches.delete(batch.id)
    assert client.messages.batches.cancel(batch.id).processing_status == "canceling"
    done = ended(client, batch.id)
    assert done.request_counts.canceled == 30
    assert [one.result.type for one in client.messages.batches.results(batch.id)] == ["canceled"] * 30


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "1 to"),
        ([item("a"), item("a")], "not unique"),
        ([item("a b")], "letters"),
        ([item("a", stream=True)], "not streamed"),
        ([{"custom_id": "a"}], "params"),
    ],
)
def test_batches_that_are_refused(client: anthropic.Anthropic, requests: Any, words: str) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError) as refused:
        client.messages.batches.create(requests=requests)
    assert words in str(refused.value)
    assert refused.value.body["type"] == "error"  # type: ignore[index]


def test_pages_of_a_list(client: anthropic.Anthropic) -> None:
    made = [client.messages.batches.create(requests=[item("a")]).id for _ in range(4)]
    first = client.messages.batches.list(limit=2)
    assert first.has_more
    before = client.messages.batches.list(limit=1000, before_id=first.data[1].id)
    assert before.data[-1].id == first.data[0].id
    assert set(made) <= {one.id for one in client.messages.batches.list(limit=2)}
