"""Signals as an event of a poll loop."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def signals_as_events(
    handler: Callable[[int, FrameType | None], None], more: Sequence[signal.Signals] = ()
) -> Iterator[socket.socket]:
    """Calls `handler` for each of SIGNALS and `more`, and yields a socket that becomes readable at each signal. A
    signal that was already ignored (nohup, a shell's background job) stays ignored. Main thread only."""
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    before = {s: signal.getsignal(s) for s in (*SIGNALS, *more) if signal.getsignal(s) != signal.SIG_IGN}
    for signum in before:
        signal.signal(signum, handler)
    wakeup = signal.set_wakeup_fd(sender.fileno())
    try:
        yield receiver
    finally:
        signal.set_wakeup_fd(wakeup)
        for signum, previous in before.items():
            signal.signal(signum, previous)
        receiver.close()
        sender.close()
