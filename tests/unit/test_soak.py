"""The soak's own rules: what a fault excuses, what is lost, and what has grown."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.support.clients.streams import StreamError
from tests.support.measuring.soak.faults import _read_late
from tests.support.measuring.soak.ledger import GRACE_S, Ledger, Loss
from tests.support.measuring.soak.report import Summary, grown, main, report


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def status(code: int, error: Any) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "http://x/")
    response = httpx.Response(code, json={"error": {"code": error, "message": "m"}}, request=request)
    return httpx.HTTPStatusError("m", request=request, response=response)


def test_a_fault_excuses_what_it_names_and_nothing_else() -> None:
    ledger = Ledger()
    sent = ledger.clock()
    with ledger.fault("httpserver killed", Loss.CONNECTION), ledger.fault("a full queue", Loss.OVERLOADED):
        pass
    ledger.failure(sent, httpx.ReadError("gone"))
    ledger.failure(sent, httpx.RemoteProtocolError("incomplete chunked read"))
    ledger.failure(sent, status(503, "overloaded"))
    assert not ledger.lost
    assert ledger.excused == {
        f"{Loss.CONNECTION}: httpserver killed": 2,
        f"{Loss.OVERLOADED}: a full queue": 1,
    }
    for error in (status(503, "loading"), status(503, "shutting_down"), status(400, "overloaded")):
        ledger.failure(sent, error)
    ledger.failure(sent, status(500, "internal_error"))
    ledger.failure(sent, RuntimeError("the engine crashed"))
    ledger.failure(sent, ValueError("not JSON"))
    assert len(ledger.lost) == 6
    assert "httpserver killed" in ledger.lost[0]


def test_a_refusal_that_comes_within_a_stream_is_a_refusal() -> None:
    """On a busy machine it takes longer than the status line waits for it."""
    ledger = Ledger()
    refused = StreamError({"message": "the server is busy", "code": "overloaded"})
    with ledger.fault("a full queue", Loss.OVERLOADED):
        ledger.failure(ledger.clock(), refused)
        assert not ledger.lost
        ledger.failure(ledger.clock(), StreamError({"message": "the engine crashed", "code": "engine_error"}))
    assert ledger.excused.total() == len(ledger.lost) == 1


def test_an_error_in_the_stream_is_excused_where_a_fault_may_be_a_crash() -> None:
    ledger = Ledger()
    with ledger.fault("router has little memory", Loss.ERROR):
        ledger.failure(ledger.clock(), RuntimeError("the engine crashed"))
        ledger.failure(ledger.clock(), status(500, "engine_error"))
    assert ledger.excused.total() == 2
    assert not ledger.lost


@pytest.mark.parametrize(
    ("sent", "now", "is_excused"),
    [(99.0, 101.0, True), (99.0, 200.0, True), (111.0, 111.5, True), (110.0 + GRACE_S + 0.1, 120.0, False)],
)
def test_a_fault_excuses_those_that_lived_through_it(sent: float, now: float, is_excused: bool) -> None:
    """And those that were sent just after its end."""
    clock = Clock()
    ledger = Ledger(clock=clock)
    with ledger.fault("httpserver killed", Loss.CONNECTION):
        clock.now = 110.0
    clock.now = now
    ledger.failure(sent, httpx.ReadError("gone"))
    assert bool(ledger.excused) is is_excused
    assert bool(ledger.lost) is not is_excused


def test_another_answer_is_never_excused() -> None:
    ledger = Ledger()
    with ledger.fault("worker killed", *Loss):
        ledger.answer(["a", "b"], ["a", "b"])
        ledger.answer(["a", "c"], ["a", "b"])
        ledger.answer(["a"], ["a", "b"])
    assert ledger.answered == 1
    assert [line.rpartition(" ")[2] for line in ledger.lost] == ["1", "None"]


def test_each_fault_has_a_line() -> None:
    log = io.StringIO()
    ledger = Ledger(log, Clock())
    with ledger.fault("worker stopped", Loss.OVERLOADED, stopped_s=2.5) as fault:
        fault.details["tokens"] = 3
    ledger.lose("an answer")
    assert [json.loads(line) for line in log.getvalue().splitlines()] == [
        {"at": 0.0, "kind": "worker stopped", "seconds": 0.0, "stopped_s": 2.5, "tokens": 3},
        {"at": 0.0, "kind": "LOST", "what": "an answer"},
    ]


def summary_of(ledger: Ledger, seed: int = 0, *, had_full_directory: bool = True) -> Summary:
    summary = Summary(seed)
    summary.take(ledger, had_full_directory=had_full_directory)
    return summary


def test_the_verdict() -> None:
    ledger = Ledger()
    with ledger.fault("worker killed", Loss.OVERLOADED):
        ledger.failure(ledger.clock(), status(503, "overloaded"))
    lines = report([summary_of(ledger)])
    assert lines[-1] == "verdict: nothing was lost"
    assert [line.split() for line in lines[:2]] == [["1", "worker", "killed"], ["1", "FAULTS"]]
    ledger.lose("an answer")
    assert report([summary_of(ledger)])[-2:] == ["    LOST  an answer", "verdict: something was lost"]


def test_several_soaks_are_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = Ledger()
    with ledger.fault("worker killed", Loss.OVERLOADED):
        ledger.failure(ledger.clock(), status(503, "overloaded"))
    ledger.answer(["a"], ["a"])
    whole = summary_of(ledger, 1)
    whole.requests, whole.memory_at_first, whole.memory_at_last = 6000, {"worker": 100}, {"worker": 102}
    files = [tmp_path / "1.json", tmp_path / "2.json"]
    files[0].write_bytes(msgspec.json.encode(whole))
    files[1].write_bytes(msgspec.json.encode(summary_of(ledger, 2, had_full_directory=False)))
    assert main(list(map(str, files))) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:2] == ["seed", "1,"]
    assert lines[1][-1] == "+2.0%"
    assert lines[2:5] == [
        ["2", "worker", "killed"],
        ["2", "FAULTS"],
        ["2", *["ANSWERS,", "each", "as", "undisturbed"]],
    ]
    assert lines[5][0] == "2"
    assert lines[6][:4] == ["a", "full", "runtime", "directory"]
    ledger.lose("an answer")
    files[1].write_bytes(msgspec.json.encode(summary_of(ledger, 2)))
    assert main(list(map(str, files))) == 1


def test_what_has_grown() -> None:
    assert grown({"worker": 100, "router": 100}, {"worker": 105, "router": 106}) == ["router"]
    assert grown({"worker": 100}, {"worker": 100, "checker": 1}) == ["checker"]


@pytest.mark.parametrize(
    ("stream", "error"),
    [
        (b"data: {}\n\ndata: [DONE]\n\n", None),
        (b"data: {}\n\n", EOFError),
        (b'data: {"error": {"message": "the engine crashed"}}\n\ndata: [DONE]\n\n', RuntimeError),
    ],
)
def test_a_stream_that_is_read_late_has_an_end(stream: bytes, error: type[Exception] | None) -> None:
    async def read() -> int:
        transport = httpx.MockTransport(lambda _: httpx.Response(200, content=stream))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            return await _read_late(http, {}, 0.0)

    if error is None:
        assert asyncio.run(read()) == len(stream)
    else:
        with pytest.raises(error):
            asyncio.run(read())
