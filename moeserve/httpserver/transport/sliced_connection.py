"""uvicorn's HTTP/1.1 connection, which parses only in its turns (`turns.py`).

uvicorn itself parses all bytes of a read at once; these may be thousands of requests of a client without a key. After a
refusal it reads the rest of the body, however long the body is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

import httptools
from uvicorn._types import ASGISendEvent
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from moeserve.httpserver.transport.held_input import BLANKS_SLICE, HEAD_SLICE, HeldInput
from moeserve.httpserver.transport.sse import BREAKS_OFF
from moeserve.httpserver.transport.turns import (
    BYTE_S,
    CONNECTION_S,
    PARSED_BYTE_S,
    READ_S,
    Account,
    Need,
    Turns,
)

HELD_BYTES: Final = 64 << 10  # bytes kept of requests after the one being answered
LINGER_S: Final = 5.0  # how long the rest of an unread body is received and dropped
LINGER_BYTES: Final = 32 << 20  # at most this many bytes of it: the largest body
# After this many small reads a request is read again only after a while, so that a client that sends it byte by byte
# costs a turn for many bytes instead of one for each.
SMALL_READS: Final = 8
SMALL_READ: Final = 64  # bytes: a smaller one is small
SMALL_READ_S: Final = 0.1

PROBES: Final = b"/health"  # prefix of the probes' paths

SendMessage = Callable[[ASGISendEvent], Coroutine[Any, Any, None]]


class SlicedHttpProtocol(HttpToolsProtocol):
    """Parses one slice of the received bytes in each turn, and a next request only after the one before it is answered.
    An answer to a request that has not arrived completely is the connection's last: it says `connection: close`, and
    bytes that the client still sends are dropped for a while. (If the connection were closed at once, the kernel would
    reset it, and the client could lose the answer.)

    An `Upgrade` header is ignored, as HTTP allows. (httptools treats the bytes after such a head as another protocol,
    so the body would be lost or read as the next request.)"""

    def __init__(self, *args: Any, turns: Turns | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._turns = turns or Turns()
        self.account = Account(is_trusted=self._turns.is_open)
        self._held = HeldInput()
        self._is_arriving = False  # a request's first bytes have been parsed, but not its last
        self._waits_to_begin = False  # its head has been parsed, but the application has not been started
        self._keeps_alive = False  # its head asks to keep the connection alive
        self._is_known = False  # this head is being parsed a second time, without its Upgrade
        self._is_refused = False  # a request was refused: nothing after it is parsed
        self._is_last = False  # the server is ending: the waiting request is this connection's last
        self._small_reads = 0  # since the last request began
        self._reads_later: asyncio.TimerHandle | None = None  # after a small read
        self._lingering: asyncio.TimerHandle | None = None
        self._dropped_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = FlowControl(self)  # type: ignore[arg-type]  # pauses and resumes reading through this object
        # Refused requests on new connections wait for it, heads and probes do not.
        self._turns.charge(self, CONNECTION_S, Need.BEGIN)

    def connection_lost(self, exc: Exception | None) -> None:
        self._turns.forget(self)
        self._held.clear()
        for timer in (self._lingering, self._reads_later):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    # ------------------------------------------------------------ reading

    def data_received(self, data: bytes) -> None:
        self._turns.charge(self, READ_S + len(data) * BYTE_S)
        self.pause_reading()
        self._small_reads += len(data) < SMALL_READ
        if self._is_refused:
            self._drop(len(data))
        else:
            self._unset_keepalive_if_required()
            self._held.add(data)
            self._go_on()

    def pause_reading(self) -> None:
        if not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        """Called when the application has read the part of the body that had arrived."""
        self._go_on()

    @property
    def _may_parse(self) -> bool:
        """Returns whether the next bytes may be parsed: they belong to the request that is arriving, or the last
        request has been answered; and the connection does not wait for its turn to begin, and reading is not paused."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return (self._is_arriving or is_answered) and not self._waits_to_begin and not self.flow.read_paused

    def _go_on(self) -> None:
        """Asks for a turn if there is something to do, and reads from the socket if no bytes are held. While a request
        is being answered the socket is always read, to notice a disconnect."""
        if self._is_refused or self.transport.is_closing():
            return
        may_parse = self._may_parse
        if self._waits_to_begin or (self._held and may_parse):
            self._unset_keepalive_if_required()
            self._turns.ask(self)
        held_at_most = 0 if may_parse or self._waits_to_begin else HELD_BYTES
        if len(self._held) <= held_at_most and not self.flow.read_paused:
            self._read_on()

    def _read_on(self) -> None:
        if self._small_reads <= SMALL_READS or not (self._is_arriving or self._is_refused or self._held):
            self.transport.resume_reading()
        elif self._reads_later is None:
            self._reads_later = self.loop.call_later(SMALL_READ_S, self._after_a_while)

    def _after_a_while(self) -> None:
        self._reads_later, self._small_reads = None, SMALL_READS
        if not self._is_refused:
            self._go_on()
        elif not self.transport.is_closing():
            self.transport.resume_reading()

    @property
    def need(self) -> Need:
        if self._is_refused:
            return Need.BEGIN
        if not self._waits_to_begin:
            return Need.PARSE
        return Need.PROBE if self.url.startswith(PROBES) else Need.BEGIN

    @property
    def expected_s(self) -> float:
        is_head = self.need is Need.PARSE and not self._is_arriving
        return min(len(self._held), HEAD_SLICE) * PARSED_BYTE_S if is_head else 0.0

    def take_turn(self) -> bool:
        """Parses a slice, or begins the request whose head has been parsed. Asks for another turn if there is more to
        do. Returns whether a request has begun."""
        if self.transport.is_closing():
            return False
        if self._is_refused:
            self._read_on()
            return False
        cycle = self.cycle
        if self._waits_to_begin:
            self._begin()
        else:
            self._parse_slice()
        if self._is_arriving and self._may_parse and self._held.has_rest_of_body:
            self._parse(self._held.next_slice())
        self._go_on()
        return self.cycle is not cycle

    def _parse_slice(self) -> None:
        if not self._is_arriving:
            skipped = self._held.skip_blank_lines()
            self.blank_lines_came(skipped)
            if skipped == BLANKS_SLICE:  # more may follow, in another turn
                return
        if self._held and not self._is_refused:
            self._parse(self._held.next_slice())

    def blank_lines_came(self, size: int) -> None:
        """Called with the number of bytes of blank lines before a request."""

    def _parse(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self._is_refused and self.parser.get_method() != b"CONNECT":
                self._parse_without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            if not self._is_refused:
                self.refuse_unreadable()

    def refuse_unreadable(self) -> None:
        """Called when the received bytes are not HTTP."""
        self.send_400_response("Invalid HTTP request received.")

    def _parse_without_upgrade(self, rest: bytes) -> None:
        """Parses the head again with a new parser, without its Upgrade, and then `rest`."""
        head = [b"%s %s HTTP/1.1\r\n" % (self.parser.get_method(), self.url)]
        head += [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._is_known = True
        self._parse(b"".join([*head, b"\r\n"]))
        self._is_known = False
        if rest and not self._is_refused:
            self._parse(rest)

    # ------------------------------------------------------------ what the parser has found

    def on_message_begin(self) -> None:
        if not self._is_known:
            super().on_message_begin()
            self._is_arriving, self._small_reads = True, 0

    def on_url(self, url: bytes) -> None:
        if not self._is_known:
            super().on_url(url)

    def head_came(self) -> None:
        """Called when the head is complete and valid. Refuses a request without a path; otherwise starts the
        application now, or for an unadmitted request (`turns.py`) in a later turn."""
        if not _has_path(self.url):
            self.refuse_unreadable()
            return
        length = next((int(value) for name, value in self.headers if name == b"content-length"), 0)
        is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        self._held.begin_body(None if is_chunked else length)
        is_http_1_0 = self.parser.get_http_version() == "1.0"
        self._keeps_alive = self.parser.should_keep_alive() and not is_http_1_0 and not self._is_last
        method = self.parser.get_method()
        if method == b"CONNECT":  # the parser treats what follows as another protocol
            self._keeps_alive = False
        self.account.begin_request(may_be_trusted=self._turns.is_open and method == b"POST")
        if self._turns.is_known(self.headers):
            self._turns.admit(self)
        if self.account.is_unadmitted:
            self._waits_to_begin = True
        else:
            self._begin()

    def _begin(self) -> None:
        self._waits_to_begin = False
        self.begin_request()
        if not self._is_arriving:
            self._end_of_request()

    def begin_request(self) -> None:
        """Starts the application."""
        app = self.app
        self.app = partial(self._turns.metered, app, self)
        super().on_headers_complete()
        self.app = app
        self.cycle.transport = _Output(self)  # type: ignore[assignment]
        self.cycle.send = self._ending(self.cycle)  # type: ignore[assignment, method-assign]
        self.cycle.keep_alive = self._keeps_alive

    def _ending(self, cycle: RequestResponseCycle) -> SendMessage:
        """Returns a `send` for the cycle that adds `connection: close` if the answer is the connection's last, and
        sends a body that breaks off without its end."""
        plain: SendMessage = cycle.send

        async def send(message: ASGISendEvent) -> None:
            if message["type"] == "http.response.start":
                cycle.keep_alive &= not self._is_arriving
            elif message["type"] == "http.response.body" and BREAKS_OFF in message:
                message = {**message, "body": _without_end(cycle, message.get("body", b""))}
            await plain(message)

        return send

    def on_body(self, body: bytes) -> None:
        self._held.body_came(len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._held.end_message()
        self._is_arriving = False
        if not self._waits_to_begin:
            self._end_of_request()

    def _end_of_request(self) -> None:
        super().on_message_complete()

    # ------------------------------------------------------------ ending

    def on_response_complete(self) -> None:
        self.account.end_request()
        if self._lingering is None:
            super().on_response_complete()
            self._go_on()

    def shutdown(self) -> None:
        """Called when the server ends: closes the connection, after answering a request that waits for its turn."""
        if self._lingering is not None:
            self.transport.close()
        elif self._waits_to_begin or (self._held and self._may_parse):
            self._is_last, self._keeps_alive = True, False
        else:
            super().shutdown()

    def end_connection(self) -> None:
        """Called when the connection's last answer is written."""
        if self._is_arriving or self._held:
            self.linger()
        else:
            self.transport.close()

    def linger(self) -> None:
        """Closes the sending direction, and drops the bytes that the client sends until the client closes the other
        direction."""
        if self._lingering is not None or self.transport.is_closing():
            return
        self._is_refused = True
        self._held.clear()
        self._unset_keepalive_if_required()
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._lingering = self.loop.call_later(LINGER_S, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.transport.resume_reading()

    def _drop(self, size: int) -> None:
        self._dropped_bytes += size
        if self._dropped_bytes > LINGER_BYTES:
            self.transport.close()
        else:
            self._turns.ask(self)


def _without_end(cycle: RequestResponseCycle, part: bytes) -> bytes:
    """Returns what the socket gets of the last part of a body that breaks off. The cycle sends it as it is, and then
    closes the connection."""
    if cycle.chunked_encoding:
        part = b"%x\r\n%b\r\n" % (len(part), part) if part else b""
    cycle.chunked_encoding, cycle.expected_content_length, cycle.keep_alive = False, len(part), False
    return part


def _has_path(url: bytes) -> bool:
    try:
        path = httptools.parse_url(url).path
    except httptools.HttpParserInvalidURLError:
        return False
    return path is not None and path.isascii()


class _Output:
    """The part of the transport that a cycle uses."""

    def __init__(self, connection: SlicedHttpProtocol) -> None:
        self._connection = connection
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        self._connection.end_connection()
