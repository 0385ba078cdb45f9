"""The load generator against a scripted server: what counts as a token, what as a failure, and when requests go out."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiohttp
import pytest
from aiohttp import web

from moeserve.cli.bench.client import Client, Pieces, StreamedAnswer, _Choice, _Chunk, _Usage
from moeserve.cli.bench.load import Load, Run
from moeserve.cli.bench.prompts import ChatPrompts, ProbeFailed, TextPrompts, WordCount, choose_writer
from moeserve.cli.workload.metrics import Outcome
from moeserve.cli.workload.shapes import WorkloadShape, generate
from moeserve.cli.workload.trace import Session, Turn, Workload

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Returned = TypeVar("Returned")
Part = bytes | float  # to send, or seconds to wait


def event(text: str | None = None, **fields: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    return b"data: " + json.dumps({"choices": choices} | fields).encode() + b"\n\n"


def usage(prompt: int, completion: int, **more: Any) -> bytes:
    return event(usage={"prompt_tokens": prompt, "completion_tokens": completion} | more)


DONE = b"data: [DONE]\n\n"


def scripted(parts: Sequence[Part]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for part in parts:
            if isinstance(part, bytes):
                await response.write(part)
            else:
                await asyncio.sleep(part)
        return response

    return handle


async def against(handler: Handler, use: Callable[[Client], Awaitable[Returned]], **common: Any) -> Returned:
    """What `use` returns, given a client of a server that answers every request with `handler`."""
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (address,) = runner.addresses
    try:
        async with aiohttp.ClientSession() as session:
            return await use(Client(session, f"http://127.0.0.1:{address[1]}/v1/completions", common))
    finally:
        await runner.cleanup()


def ask(parts: Sequence[Part]) -> StreamedAnswer:
    async def use(client: Client) -> StreamedAnswer:
        return await client.ask({"prompt": "x"}, 11)

    return asyncio.run(against(scripted(parts), use))


def test_times_and_counts_of_an_answer() -> None:
    answer = StreamedAnswer(Outcome(1.0, 11))
    pieces = Pieces(answer)
    for text, now in [("a", 1.25), ("b", 1.75), ("c", 2.75)]:
        pieces.take(_Chunk([_Choice(text)]), now)
    pieces.take(_Chunk(usage=_Usage(9, 3)), 4.0)
    pieces.finish(5.0)
    outcome = answer.outcome
    assert answer.text == "abc"
    assert (outcome.error, outcome.prompt_len, outcome.output_len) == ("", 9, 3)
    assert (outcome.ttft, list(outcome.itls), outcome.latency) == (0.25, [0.5, 1.0], 1.75)


@pytest.mark.parametrize(("tokens", "error"), [(1, ""), (0, "the stream ended without a token")])
def test_an_answer_without_text(tokens: int, error: str) -> None:
    """Half a character is a token without text; an answer without tokens is a failure."""
    answer = StreamedAnswer(Outcome(1.0, 11))
    pieces = Pieces(answer)
    pieces.take(_Chunk(usage=_Usage(9, tokens)), 1.5)
    pieces.finish(1.75)
    assert answer.outcome.error == error
    if tokens:
        assert (answer.outcome.ttft, answer.outcome.output_len, answer.outcome.prompt_len) == (0.75, 1, 9)


def test_an_answer_takes_as_long_as_the_server_needs() -> None:
    outcome = ask([0.05, event("a"), 0.05, event("b") + usage(9, 2), DONE]).outcome
    assert outcome.ttft >= 0.05
    assert outcome.latency >= 0.1
    assert outcome.latency == pytest.approx(outcome.ttft + sum(outcome.itls))


def test_events_may_be_cut_anywhere() -> None:
    whole = b": ping\r\n\r\n" + event("één").replace(b"\n", b"\r\n") + event("b") + usage(4, 2) + DONE
    for cut in range(1, len(whole), 7):
        answer = ask([whole[:cut], 0.001, whole[cut:]])
        assert (answer.text, answer.outcome.output_len, answer.outcome.prompt_len) == ("éénb", 2, 4)


def test_without_usage_pieces_are_tokens() -> None:
    outcome = ask([event("a"), event("b"), DONE]).outcome
    assert (outcome.output_len, outcome.prompt_len, outcome.cached_tokens) == (2, 11, 0)


def test_cached_tokens_and_token_ids_are_read() -> None:
    piece = event(choices=[{"text": "", "token_ids": [5, 6]}])
    answer = ask([piece, usage(9, 2, prompt_tokens_details={"cached_tokens": 8}), DONE])
    assert (answer.outcome.cached_tokens, answer.token_ids) == (8, [5, 6])


def test_a_chats_role_and_end_are_no_tokens() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "b"},
        {},
    ]
    answer = ask([event(choices=[{"delta": delta}]) for delta in deltas] + [usage(5, 2), DONE])
    assert answer.text == "ab"
    assert len(answer.outcome.itls) == 1
    thinking = ask([event(choices=[{"delta": {"reasoning_content": "hm"}}]), usage(5, 1), DONE])
    assert (thinking.outcome.error, thinking.outcome.output_len) == ("", 1)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([usage(5, 0), DONE], "without a token"),
        ([event("a"), event(error={"message": "out of luck"}), DONE], "out of luck"),
        ([event("a"), b"data: {nonsense}\n\n"], "DecodeError"),
    ],
)
def test_a_stream_that_goes_wrong_is_a_failure(parts: Sequence[Part], message: str) -> None:
    assert message in ask(parts).outcome.error


def test_an_error_status_is_a_failure_with_its_text() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, text="busy")

    async def use(client: Client) -> StreamedAnswer:
        return await client.ask({}, 1)

    answer = asyncio.run(against(refuse, use))
    assert (answer.status, answer.outcome.error) == (503, "HTTP 503: busy")


def test_no_server_is_a_failure() -> None:
    async def use() -> StreamedAnswer:
        async with aiohttp.ClientSession() as session:
            return await Client(session, "http://127.0.0.1:9/v1/completions", {}).ask({}, 1)

    answer = asyncio.run(use())
    assert answer.status == 0
    assert "Connect" in answer.outcome.error


# ---------------------------------------------------------------- which prompts a server takes


class FakeModel:
    """Counts a word as two tokens and every prompt as five more; answers with one token."""

    def __init__(self, *, takes_ids: bool, gives_ids: bool = False) -> None:
        self._takes_ids, self._gives_ids = takes_ids, gives_ids
        self.bodies: list[dict[str, Any]] = []

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if isinstance(body["prompt"], list) and not self._takes_ids:
            return web.Response(status=400, text="a string, please")
        words = body["prompt"].split() if isinstance(body["prompt"], str) else body["prompt"]
        ids = [8] if self._gives_ids and body.get("return_token_ids") else None
        parts = [event(choices=[{"text": " fox", "token_ids": ids}]), usage(5 + 2 * len(words), 1), DONE]
        return await scripted(parts)(request)


CHATTY = generate(WorkloadShape(input_len=25, output_len=1, prefix_len=45, num_turns=2), 2, math.inf, 1.0, 0)
SINGLE = generate(WorkloadShape(input_len=25, output_len=1), 1, math.inf, 1.0, 0)


def chosen(model: FakeModel, workload: Workload, *, text: bool = False) -> tuple[str, list[dict[str, Any]]]:
    """The form chosen, and the bodies of the workload's requests."""

    async def use(client: Client) -> str:
        writer, form = await choose_writer(client, workload, chat=False, text=text)
        model.bodies.clear()
        await Load(client, workload, writer, None, lambda: None).run()
        return form

    return asyncio.run(against(model.handle, use, model="m", ignore_eos=True)), model.bodies


def test_ids_where_they_are_taken() -> None:
    form, (body,) = chosen(FakeModel(takes_ids=True), SINGLE)
    assert form == "token ids"
    assert len(body["prompt"]) == 25
    assert body["max_tokens"] == 1
    assert body["model"] == "m"
    assert body["ignore_eos"] is True
    assert body["stream"] is True
    assert "return_token_ids" not in body


def test_text_where_ids_are_not_taken_or_not_wanted() -> None:
    """25 tokens are ten words of two tokens and the prompt's own five."""
    for model, text in ((FakeModel(takes_ids=False), False), (FakeModel(takes_ids=True), True)):
        form, (body,) = chosen(model, SINGLE, text=text)
        assert form == "text"
        assert len(body["prompt"].split()) == 10


def test_a_conversation_goes_on_in_ids_where_answers_come_as_ids() -> None:
    form, (first, second) = chosen(FakeModel(takes_ids=True, gives_ids=True), CHATTY)
    assert form == "token ids"
    assert second["prompt"][:71] == [*first["prompt"], 8]
    assert len(second["prompt"]) == 71 + 25


def test_a_conversation_goes_on_in_text_where_they_do_not() -> None:
    form, (first, second) = chosen(FakeModel(takes_ids=True), CHATTY)
    assert form == "text"
    assert second["prompt"].startswith(first["prompt"] + " fox")
    assert len(first["prompt"].split()) == 20 + 12


def test_chat_prompts_are_messages() -> None:
    prompts = ChatPrompts(CHATTY, 0, WordCount(5, 2))
    first = json.loads(json.dumps(prompts.body(0)))["messages"]
    assert [message["role"] for message in first] == ["system", "user"]
    prompts.answered(StreamedAnswer(Outcome(0, 0), text="fox"))
    second = prompts.body(1)["messages"]
    assert second[:2] == first
    assert [message["role"] for message in second] == ["system", "user", "assistant", "user"]
    assert second[2]["content"] == "fox"


def test_a_shared_prefix_is_shared_as_text() -> None:
    workload = generate(WorkloadShape(input_len=10, prefix_len=20, num_prefixes=2), 3, math.inf, 1.0, 0)
    a, b, c = (
        TextPrompts(workload, session, WordCount(0, 1)).body(0)["prompt"].split() for session in range(3)
    )
    assert a[:20] == c[:20] != b[:20]
    assert a[20:] != c[20:]


def test_a_server_that_does_not_answer_ends_the_probe() -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.Response(status=401, text="no key")

    async def use(client: Client) -> Any:
        return await choose_writer(client, SINGLE, chat=False, text=False)

    with pytest.raises(ProbeFailed, match="HTTP 401: no key"):
        asyncio.run(against(refuse, use))


# ---------------------------------------------------------------- when requests go out


def loaded(workload: Workload, parts: Sequence[Part], max_concurrency: int | None = None) -> Run:
    async def use(client: Client) -> Run:
        def writer(session: int) -> TextPrompts:
            return TextPrompts(workload, session, WordCount(0, 1))

        return await Load(client, workload, writer, max_concurrency, lambda: None).run()

    run: Run = asyncio.run(against(scripted(parts), use))
    return run


def test_no_more_at_once_than_allowed() -> None:
    workload = generate(WorkloadShape(input_len=3, output_len=1), 6, math.inf, 1.0, 0)
    run = loaded(workload, [0.05, event("a"), DONE], max_concurrency=2)
    sent = sorted(outcome.sent for outcome in run.outcomes)
    assert sent[2] >= 0.05
    assert sent[4] >= 0.1
    assert run.duration >= 0.15
    assert run.cpu > 0


def test_requests_keep_their_times_and_turns_their_order() -> None:
    session = Session((Turn(3, 1, not_before=0.1), Turn(3, 1, think=0.08), Turn(3, 1, not_before=0.4)))
    run = loaded(Workload((session,)), [0.02, event("a"), DONE])
    first, second, third = (outcome.sent for outcome in run.outcomes)
    assert first >= 0.1
    assert second - first >= 0.1, "the answer takes 0.02 s, then it thinks"
    assert third >= 0.4


def test_a_failed_turn_ends_its_session() -> None:
    workload = generate(WorkloadShape(input_len=3, num_turns=4), 8, math.inf, 1.0, 0)
    run = loaded(workload, [DONE])
    errors = [outcome.error for outcome in run.outcomes]
    assert len(errors) == workload.num_requests
    assert sum("without a token" in error for error in errors) == 2
    assert sum("turn before failed" in error for error in errors) == 6
