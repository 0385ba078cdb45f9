"""Messages of a Type=notify service to systemd: sd_notify(3), one datagram each."""

from __future__ import annotations

import os
import socket
from contextlib import suppress


class Systemd:
    """Sends messages to systemd; does nothing if systemd did not start this process."""

    def __init__(self, address: str | None, watchdog_s: float | None) -> None:
        self._address = address
        # longest interval between calls of `still_alive`; None: not needed
        self.interval_s = watchdog_s and watchdog_s / 2

    @classmethod
    def from_env(cls) -> Systemd:
        address = os.environ.get("NOTIFY_SOCKET")
        ours = os.environ.get("WATCHDOG_PID") in (None, str(os.getpid()))
        period = os.environ.get("WATCHDOG_USEC", "")
        return cls(address, int(period) / 1e6 if address and ours and period.isdigit() else None)

    def notify(self, state: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender, suppress(OSError):
            sender.setblocking(False)  # do not block if systemd does not read
            sender.sendto(state.encode(), address)

    def still_alive(self) -> None:
        if self.interval_s is not None:
            self.notify("WATCHDOG=1")
