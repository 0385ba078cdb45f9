"""Every message survives its wire; nothing else does; a full or oversized channel says so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from moeserve.messages import adapters, channels, codec, pictures, router_metrics, schema, steps
from moeserve.messages.async_channels import AsyncPullChannel, AsyncPushChannel
from moeserve.messages.channels import (
    ChannelFull,
    PullChannel,
    PushChannel,
)
from moeserve.messages.codec import CodecError, Decoder, encode
from moeserve.messages.pages import PageCopy, PageOrders, PageReport, TierNews
from moeserve.messages.sampling import SamplingParams, TextOptions, TokenLogprob

LOGPROB = TokenLogprob(5, -0.25, 1, (5, 7), (-0.25, -2.5))
USAGE = schema.Usage(12, 3, 8, 1.5, 20.0, 33.25)
READY = steps.WorkerReady(1000, 8, 512, 151936, 1 << 33, 1 << 20, "cpu")
SAMPLING = SamplingParams(max_tokens=9, logit_bias={3: -100.0}, stop_token_ids=(1, 2), logprobs=20)
TEXT = TextOptions(stop=("\n\n", "終わり"), include_stop=True, skip_special_tokens=False)

EXAMPLES: list[tuple[Decoder[Any], msgspec.Struct]] = [
    (codec.TO_ROUTER, schema.GenerateRequest(1 << 40, b"\1\0\0\0", SAMPLING, TEXT, 12.5, -3)),
    (
        codec.TO_ROUTER,
        schema.GenerateRequest(
            8, b"\1\0\0\0", SAMPLING, TEXT, 12.5, resumed=schema.Resumed(b"\2\0\0\0", 0, 1, 13.5)
        ),
    ),
    (
        codec.TO_ROUTER,
        schema.GenerateBatch(
            '{"grammars": []}', [schema.GenerateRequest(8, b"\1\0\0\0", SAMPLING, TEXT, 12.5)]
        ),
    ),
    (codec.TO_ROUTER, schema.Abort(7)),
    (codec.TO_ROUTER, schema.StopHit(7, 3)),
    (codec.TO_ROUTER, schema.Shutdown()),
    (codec.TO_ROUTER, schema.HeartbeatRequest()),
    (codec.TO_ROUTER, schema.HttpserverLost(1 << 40)),
    (codec.TO_ROUTER, schema.EngineReadyRequest()),
    (codec.TO_LAUNCHER, schema.Heartbeat("router")),
    (codec.TO_ROUTER, schema.WorkerExited("signal 9", by_itself=False)),
    (codec.TO_HTTP, schema.ProcessLost("router", "signal 9", by_itself=False)),
    (codec.TO_ROUTER, schema.ExpertUseRequest()),
    (codec.TO_DETOKENIZER, schema.RouterStarted()),
    (codec.TO_DETOKENIZER, schema.DetokenizeStart(7, TEXT)),
    (codec.TO_DETOKENIZER, schema.DetokenizeEnd(7)),
    (
        codec.TO_DETOKENIZER,
        schema.TokensOut([schema.TokensItem(7, [5], [LOGPROB], [LOGPROB], "length", None, USAGE)]),
    ),
    (codec.TO_DETOKENIZER, schema.RequestError(7, 500, "engine died")),
    (codec.TO_HTTP, schema.TextOut([schema.TextItem(7, "né🙂", [5], [LOGPROB], None, "stop", "\n", USAGE)])),
    (codec.TO_HTTP, router_metrics.LoadReport(*range(10))),
    (codec.TO_HTTP, schema.EngineReady(READY)),
    (codec.TO_HTTP, schema.EngineLost("killed")),
    (codec.TO_HTTP, schema.ProcessLost("router", "signal 9", by_itself=False)),
    (codec.TO_HTTP, schema.LoadProgress("weights", 1, 2)),
    (codec.TO_LAUNCHER, schema.ProcessReady("worker", 12, None, READY)),
    (codec.TO_LAUNCHER, schema.ProcessFailed("httpserver", "port 8000 is in use")),
    (codec.TO_LAUNCHER, schema.ReplaceWorker(12, "the worker does not answer")),
    (codec.FROM_WORKER, READY),
    (codec.FROM_WORKER, steps.StepResult(3, [steps.Sampled(5, LOGPROB)], {0: [LOGPROB]}, 1.0, 0.5)),
    (
        codec.FROM_WORKER,
        steps.StepResult(
            4, [], {}, 0.0, 0.5, pages=PageReport(TierNews(b"s", b"g", b"r", b"k", b"l", 1.5), failed=b"f")
        ),
    ),
    (
        codec.STEP_PLAN,
        steps.StepPlan(4, [], [], pages=PageOrders([PageCopy(b"k", b"0123")], [PageCopy(b"l", b"4567")])),
    ),
    (codec.TO_ROUTER, adapters.LoadAdapter(3, "sql", "/adapters/sql", replaces=True)),
    (codec.TO_ROUTER, adapters.UnloadAdapter(4, "sql")),
    (codec.TO_HTTP, adapters.AdaptersServed([adapters.ServedAdapter("sql", "/adapters/sql", "ab", 12)])),
    (codec.TO_HTTP, adapters.AdapterAnswer(3, 400, "no")),
    (codec.TO_HTTP, pictures.PictureEncoded(3, 2, 4, b"\1" * 32, "7", 0.5, is_cached=True)),
    (codec.TO_HTTP, pictures.PictureRefused(3, 400, "no")),
    (codec.TO_VISUALSERVER, pictures.EncodePicture(3, b"GIF89a", 64)),
    (
        codec.ADAPTERS_WANTED,
        adapters.AdaptersWanted([adapters.AdapterSource(1, "sql", "/adapters/sql", "ab")]),
    ),
    (
        codec.FROM_WORKER,
        adapters.AdaptersReport([adapters.AdapterState(1, "ab", 12), adapters.AdapterState(2)]),
    ),
    (codec.FROM_WORKER, steps.WorkerError("out of memory")),
    (codec.FROM_WORKER, steps.ExpertUse(1, 2, 1, b"\1\0\0\0\0\0\0\0" * 2, b"\0\1")),
    (
        codec.STEP_PLAN,
        steps.StepPlan(
            3, [steps.NewSeq(0, b"\1\0\0\0", 1, b"", SAMPLING)], [steps.Row(0, 0, 1, b"\0" * 4, True)]
        ),
    ),
    (
        codec.STEP_PLAN,
        steps.StepPlan(
            4,
            [steps.NewSeq(0, b"\1\0\0\0", 1, b"", SAMPLING, "id", state_slot=2)],
            [steps.Row(0, 0, 1, b"\0" * 4, True)],
            state_copies=b"\xff\xff\xff\xff\2\0\0\0",
        ),
    ),
]


@pytest.mark.parametrize(("decoder", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_message_survives_the_wire(decoder: Decoder[Any], message: msgspec.Struct) -> None:
    assert decoder.decode(encode(message)) == message


def test_every_member_of_every_union_is_tried() -> None:
    unions = (schema.ToRouter, schema.ToDetokenizer, schema.ToHttp, schema.ToLauncher, schema.FromWorker)
    members = {member for union in unions for member in union.__args__}
    assert members <= {type(message) for _, message in EXAMPLES}


@pytest.mark.parametrize(("decoder", "message"), EXAMPLES, ids=lambda value: type(value).__name__)
def test_truncated_message_is_refused(decoder: Decoder[Any], message: msgspec.Struct) -> None:
    frame = encode(message)
    for length in range(len(frame)):
        with pytest.raises(CodecError):
            decoder.decode(frame[:length])


def test_message_for_another_process_is_refused() -> None:
    with pytest.raises(CodecError, match="TextOut"):
        codec.TO_ROUTER.decode(encode(schema.TextOut(items=[])))


def test_wrong_field_type_is_refused() -> None:
    with pytest.raises(CodecError):
        codec.TO_ROUTER.decode(msgspec.msgpack.encode({"type": "Abort", "id": "seven"}))


@given(st.one_of(st.binary(max_size=64), st.integers(0, 5000).map(lambda n: b"\x91" * n)))
def test_arbitrary_bytes_raise_only_codec_error(frame: bytes) -> None:
    for decoder in (codec.TO_ROUTER, codec.TO_DETOKENIZER, codec.TO_HTTP, codec.FROM_WORKER):
        with pytest.raises(CodecError):
            decoder.decode(frame)


@given(st.sampled_from(EXAMPLES), st.data())
def test_flipped_byte_decodes_or_raises_codec_error(
    example: tuple[Decoder[Any], msgspec.Struct], data: st.DataObject
) -> None:
    decoder, message = example
    frame = bytearray(encode(message))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(CodecError):
        decoder.decode(bytes(frame))


@pytest.mark.parametrize(
    "message",
    [schema.RequestError(1, 400, "\ud800"), schema.Abort(1 << 70)],
    ids=["lone surrogate", "70 bits"],
)
def test_what_msgpack_cannot_hold_is_refused_by_the_sender(message: msgspec.Struct) -> None:
    with pytest.raises(CodecError):
        encode(message)


# ---------------------------------------------------------------- channels


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(linger=0)


def test_messages_arrive_in_order_even_when_sent_before_the_receiver_is_up(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path / 'router'}"
    push = PushChannel(context, address)
    for i in range(100):
        push.send(schema.Abort(i))
    pull = PullChannel(context, address, codec.TO_ROUTER)
    received = [pull.recv(timeout=30) for _ in range(100)]
    assert received == [schema.Abort(i) for i in range(100)]
    assert pull.drain() == []
    assert pull.recv(timeout=0) is None


def test_drain_takes_what_is_there_up_to_the_limit(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path / 'router'}"
    pull = PullChannel(context, address, codec.TO_ROUTER)
    push = PushChannel(context, address)
    for i in range(10):
        push.send(schema.Abort(i))
    got: list[schema.ToRouter] = []
    while len(got) < 4:
        got += pull.drain(limit=4 - len(got))
    assert got == [schema.Abort(i) for i in range(4)]


def test_full_channel_raises_and_loses_nothing_it_accepted(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "HIGH_WATER_MARK", 5)
    monkeypatch.setattr(channels, "SEND_TIMEOUT_S", 0.05)
    address = f"ipc://{tmp_path / 'router'}"
    push = PushChannel(context, address)
    for i in range(5):
        push.send(schema.Abort(i))
    with pytest.raises(ChannelFull, match="Abort"):
        push.send(schema.Abort(5))
    assert push.try_send(schema.Abort(6)) is False
    pull = PullChannel(context, address, codec.TO_ROUTER)
    assert [pull.recv(timeout=30) for _ in range(5)] == [schema.Abort(i) for i in range(5)]
    assert pull.recv(timeout=0.1) is None


def test_oversized_message_is_refused_by_the_sender(
    context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "MAX_MESSAGE_BYTES", 1000)
    push = PushChannel(context, f"ipc://{tmp_path / 'http'}")
    with pytest.raises(CodecError, match="1000"):
        push.send(schema.RequestError(1, 500, "x" * 1000))


def test_malformed_frame_raises_codec_error(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'router'}"
    pull = PullChannel(context, address, codec.TO_ROUTER)
    PushChannel(context, address).socket.send(b"\xc1garbage")
    with pytest.raises(CodecError):
        pull.recv(timeout=30)


@pytest.mark.parametrize(
    "address", ["tcp://127.0.0.1:5555", "inproc://x", "ipc://relative", "ipc:///" + "x" * 107]
)
def test_only_unix_sockets_with_a_path_that_fits(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> None:
    with pytest.raises(ValueError, match="socket"):
        PushChannel(context, address)
    with pytest.raises(ValueError, match="socket"):
        PullChannel(context, address, codec.TO_ROUTER)


def test_receiving_end_is_a_unix_socket(context: zmq.Context[zmq.Socket[bytes]], tmp_path: Path) -> None:
    PullChannel(context, f"ipc://{tmp_path / 'router'}", codec.TO_ROUTER)
    assert stat.S_ISSOCK(os.stat(tmp_path / "router").st_mode)


def test_async_ends_talk_to_each_other_and_report_a_full_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(channels, "SEND_TIMEOUT_S", 0.05)

    async def talk() -> list[schema.ToHttp]:
        context = zmq.asyncio.Context()
        try:
            address = f"ipc://{tmp_path / 'http'}"
            pull = AsyncPullChannel(context, address, codec.TO_HTTP)
            push = AsyncPushChannel(context, address)
            for i in range(50):
                await push.send(schema.RequestError(i, 500, "x"))
            received = [await asyncio.wait_for(pull.recv(), 60) for _ in range(50)]
            monkeypatch.setattr(channels, "HIGH_WATER_MARK", 3)
            nobody = AsyncPushChannel(context, f"ipc://{tmp_path / 'nobody'}")
            for i in range(3):
                await nobody.send(schema.Abort(i))
            with pytest.raises(ChannelFull):
                await nobody.send(schema.Abort(3))
            return received
        finally:
            context.destroy(linger=0)

    assert asyncio.run(talk()) == [schema.RequestError(i, 500, "x") for i in range(50)]
