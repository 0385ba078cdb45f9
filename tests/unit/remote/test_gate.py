"""What a stranger, a client that misbehaves and a second router get from the gate, over real TLS."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from moeserve.remote import gate as gate_module
from moeserve.remote.channel import LOST_S, ConnectionLost
from moeserve.remote.frames import Kind, Welcome, decode_end, decode_welcome, encode_frame
from moeserve.remote.tls import link_context
from moeserve.remote.tls_files import TlsFiles
from tests.support.clients.gate_frames import SILENCE_S, channel_to, frames_of
from tests.support.servers.waiting import within
from tests.unit.remote.conftest import FINGERPRINT, READY, RunningGate, files


def client_context(authority: Path, certificate: TlsFiles | None) -> ssl.SSLContext:
    """A client's who does not check as much as a link does."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(authority / "ca.pem")
    if certificate is not None:
        context.load_cert_chain(certificate.certfile, certificate.keyfile)
    return context


@contextmanager
def raw_client(gate: RunningGate) -> Iterator[socket.socket]:
    with socket.create_connection(gate.address, SILENCE_S) as sock:
        yield sock


def read_all(sock: socket.socket) -> bytes:
    """Everything until the gate closes. Raises ssl.SSLError for an alert."""
    data = b""
    try:
        while part := sock.recv(1 << 16):
            data += part
    except ConnectionResetError:
        pass
    return data


def admitted(gate: RunningGate, context: ssl.SSLContext) -> bool:
    """Whether a client gets a single byte from the gate, or to the worker."""
    data = b""
    with raw_client(gate) as sock:
        try:
            with context.wrap_socket(sock, server_hostname="127.0.0.1") as tls:
                tls.settimeout(SILENCE_S)
                data = tls.recv(1)
        except (ssl.SSLError, ConnectionError):
            pass
    return bool(data) or bool(gate.workers)


def test_a_router_with_a_certificate_is_welcome(gate: RunningGate, certificates: Path) -> None:
    with raw_client(gate) as sock:
        context = link_context(files(certificates, "server"), "--worker-ssl-")
        with context.wrap_socket(sock, server_hostname="127.0.0.1") as tls:
            assert tls.version() == "TLSv1.3"
            kind, length = struct.unpack("!BI", tls.recv(5))
            assert kind == Kind.WELCOME
            welcome = decode_welcome(tls.recv(length))
            assert (welcome.fingerprint, welcome.ready) == (FINGERPRINT, READY)
            tls.sendall(encode_frame(Kind.DATA, b"to the worker"))
            assert gate.workers[0].recv(100) == b"to the worker"
            gate.workers[0].sendall(b"to the router")
            assert tls.recv(5 + 13) == encode_frame(Kind.DATA, b"to the router")


def test_a_client_without_a_certificate_gets_nothing(gate: RunningGate, certificates: Path) -> None:
    assert not admitted(gate, client_context(certificates, None))


def test_a_certificate_of_another_authority_gets_nothing(
    gate: RunningGate, certificates: Path, strangers_certificates: Path
) -> None:
    assert not admitted(gate, client_context(certificates, files(strangers_certificates, "server")))


def test_a_workers_certificate_is_no_servers(gate: RunningGate, certificates: Path) -> None:
    """Made with extendedKeyUsage=serverAuth, as the how-to says."""
    assert not admitted(gate, client_context(certificates, files(certificates, "worker")))


def test_older_tls_gets_nothing(gate: RunningGate, certificates: Path) -> None:
    context = client_context(certificates, files(certificates, "server"))
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    assert not admitted(gate, context)


@pytest.mark.parametrize("data", [b"\0" * 64, b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 300], ids=len)
def test_bytes_that_are_no_tls_are_closed(gate: RunningGate, data: bytes, certificates: Path) -> None:
    with raw_client(gate) as sock:
        sock.sendall(data)
        assert len(read_all(sock)) <= 7  # an alert
    assert not gate.workers
    assert admitted(gate, client_context(certificates, files(certificates, "server")))


@pytest.mark.parametrize(
    "data",
    [
        b"\x09garbage",
        struct.pack("!BI", Kind.DATA, 1 << 30),
        encode_frame(Kind.WELCOME, msgspec.msgpack.encode(Welcome("1", "2", READY))),
    ],
    ids=["garbage", "oversized", "out of place"],
)
def test_frames_that_mean_nothing_end_the_connection(
    gate: RunningGate, certificates: Path, data: bytes
) -> None:
    context = client_context(certificates, files(certificates, "server"))
    with raw_client(gate) as sock, context.wrap_socket(sock, server_hostname="127.0.0.1") as tls:
        tls.recv(1)
        tls.sendall(data)
        read_all(tls)
    gate.workers[0].settimeout(SILENCE_S)
    assert gate.workers[0].recv(100) == b""
    gate.workers.pop().close()
    assert admitted(gate, context)


def test_a_second_router_is_told_to_wait(gate: RunningGate, certificates: Path) -> None:
    first, second = channel_to(gate, certificates), channel_to(gate, certificates)
    assert frames_of(first)[0][0] is Kind.WELCOME
    ((kind, content),) = frames_of(second)
    assert kind is Kind.END
    assert decode_end(content).cause == "the worker serves another router"
    assert len(gate.workers) == 1
    for channel in (first, second):
        channel.close()


def test_the_worker_of_a_router_that_goes_is_free_for_the_next(gate: RunningGate, certificates: Path) -> None:
    for turn in range(3):
        channel = channel_to(gate, certificates)
        assert frames_of(channel)[0][0] is Kind.WELCOME
        channel.close()
        gate.workers[turn].settimeout(SILENCE_S)
        assert gate.workers[turn].recv(1) == b""


def test_a_router_that_falls_silent_is_lost_within_two_seconds(gate: RunningGate, certificates: Path) -> None:
    channel = channel_to(gate, certificates)
    assert frames_of(channel)[0][0] is Kind.WELCOME
    assert LOST_S < 2.0
    gate.workers[0].settimeout(SILENCE_S)
    assert gate.workers[0].recv(1) == b""  # nobody calls `turn`, which would send heartbeats
    channel.close()


def test_heartbeats_keep_an_idle_line(gate: RunningGate, certificates: Path) -> None:
    channel = channel_to(gate, certificates)
    assert frames_of(channel)[0][0] is Kind.WELCOME
    with pytest.raises(TimeoutError):
        frames_of(channel, 2.5)
    assert gate.gate.is_serving
    channel.close()


@pytest.mark.parametrize("by_itself", [True, False])
def test_a_router_is_told_why_its_worker_has_gone(
    gate: RunningGate, certificates: Path, by_itself: bool
) -> None:
    """Last words first."""
    channel = channel_to(gate, certificates)
    assert frames_of(channel)[0][0] is Kind.WELCOME
    gate.workers[0].sendall(b"last words")
    gate.workers[0].close()
    assert frames_of(channel) == [(Kind.DATA, b"last words")]
    gate.order(lambda: gate.gate.worker_lost("signal 11", by_itself=by_itself))
    ((kind, content),) = frames_of(channel)
    end = decode_end(content)
    assert (kind, end.cause, end.by_itself) == (Kind.END, "signal 11", by_itself)
    channel.close()


def test_a_router_learns_of_a_worker_that_goes_without_a_word(gate: RunningGate, certificates: Path) -> None:
    channel = channel_to(gate, certificates)
    assert frames_of(channel)[0][0] is Kind.WELCOME
    gate.workers[0].close()
    ((kind, content),) = frames_of(channel)
    assert (kind, decode_end(content).cause) == (Kind.END, "the worker has closed the connection")
    assert within(30, lambda: not gate.gate.is_serving)
    channel.close()


def test_connections_that_say_nothing_keep_nobody_out(
    gate: RunningGate, certificates: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than may shake hands at once; and those that are left are closed after a while."""
    monkeypatch.setattr(gate_module, "HANDSHAKE_S", 0.5)
    idle = [
        socket.create_connection(gate.address, SILENCE_S) for _ in range(gate_module.MOST_HANDSHAKES + 10)
    ]
    channel = channel_to(gate, certificates)
    assert frames_of(channel)[0][0] is Kind.WELCOME
    for sock in idle:
        assert read_all(sock) == b""
        sock.close()
    channel.close()


@pytest.mark.parametrize(
    ("name", "problem"), [("localhost", "Hostname mismatch"), ("::1", "IP address mismatch")]
)
def test_a_worker_by_another_name_is_not_spoken_to(
    gate: RunningGate, certificates: Path, name: str, problem: str
) -> None:
    channel = channel_to(gate, certificates, name)
    with pytest.raises(ConnectionLost, match=f"certificate: {problem}") as lost:
        frames_of(channel)
    assert lost.value.is_refusal
    assert not gate.workers
    channel.close()


def test_a_worker_of_another_authority_is_not_spoken_to(
    certificates: Path, strangers_certificates: Path
) -> None:
    stranger = RunningGate(strangers_certificates)
    channel = channel_to(stranger, certificates)
    with pytest.raises(ConnectionLost, match="certificate: ") as lost:
        frames_of(channel)
    assert lost.value.is_refusal
    assert not stranger.workers
    channel.close()
    stranger.close()
