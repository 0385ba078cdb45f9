"""The server's listening sockets. The launcher owns them, so they survive the death of httpserver: connections made
meanwhile wait in the backlog for its successor.

systemd may open the sockets before the server starts (socket activation, sd_listen_fds(3)).
"""

from __future__ import annotations

import dataclasses
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from moeserve.config import HEALTH_LISTENER_ENV, LISTENERS_ENV, ServerConfig
from moeserve.errors import ConfigError

BACKLOG: Final = 2048
_SYSTEMD_FIRST: Final = 3  # <systemd/sd-daemon.h>, SD_LISTEN_FDS_START


@dataclass(frozen=True)
class Listeners:
    """The listening sockets of the API (at least one) and, if configured, of --health-port."""

    api: Sequence[socket.socket]
    health: socket.socket | None = None

    def all(self) -> list[socket.socket]:
        return [*self.api, *([] if self.health is None else [self.health])]

    def descriptors(self) -> list[int]:
        return [listener.fileno() for listener in self.all()]

    def environment(self) -> dict[str, str]:
        """Returns the environment variables that name the sockets to a process that inherits their descriptors."""
        health = {} if self.health is None else {HEALTH_LISTENER_ENV: str(self.health.fileno())}
        return {LISTENERS_ENV: ",".join(str(listener.fileno()) for listener in self.api), **health}

    def close(self) -> None:
        for listener in self.all():
            listener.close()


def open_listeners(config: ServerConfig) -> Listeners:
    """Returns the inherited sockets if another process opened them, else opens those that `config` asks for. Raises
    ConfigError."""
    api, health = inherited_listeners(), _inherited(HEALTH_LISTENER_ENV)
    api = api or _from_systemd()
    if not api:
        api = [listen(config.host, config.port) if config.uds is None else listen_at(Path(config.uds))]
    if health or config.health_port is None:
        return Listeners(api, *health)
    try:
        if config.health_port in (each.getsockname()[1] for each in api if each.family != socket.AF_UNIX):
            raise ConfigError(
                f"--health-port: {config.health_port} is --port too: choose another, also with "
                "MOESERVE_HEALTH_PORT, which the container image sets"
            )
        return Listeners(api, listen(config.host, config.health_port, "--health-port"))
    except ConfigError:
        Listeners(api).close()
        raise


def inherited_listeners() -> list[socket.socket]:
    """Returns the API's listening sockets that the parent process passed."""
    return _inherited(LISTENERS_ENV)


def _inherited(variable: str) -> list[socket.socket]:
    """Returns the sockets that an environment variable names, and deletes the variable so that no child sees it."""
    return [_adopt(int(number)) for number in filter(None, os.environ.pop(variable, "").split(","))]


def _from_systemd() -> list[socket.socket]:
    """Returns the sockets that systemd passed. Raises ConfigError if one is not a listening stream socket."""
    process, count = os.environ.pop("LISTEN_PID", ""), os.environ.pop("LISTEN_FDS", "")
    os.environ.pop("LISTEN_FDNAMES", None)
    if process != str(os.getpid()) or not count.isdigit():
        return []
    listeners = [_adopt(number) for number in range(_SYSTEMD_FIRST, _SYSTEMD_FIRST + int(count))]
    for listener in listeners:
        if not listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ConfigError(
                "systemd has passed a socket that does not listen: use ListenStream= and Accept=no"
            )
    return listeners


def _adopt(descriptor: int) -> socket.socket:
    listener = socket.socket(fileno=descriptor)
    listener.set_inheritable(False)
    return listener


def listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    """Opens a listening TCP socket; port 0 chooses a free port. Raises ConfigError, which names `flag`."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        both = family == socket.AF_INET6 and address[0] == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} of {host} is in use: choose another with {flag}") from error
        reason = error.strerror or str(error)
        if isinstance(error, socket.gaierror) and ("/" in host or "[" in host or host.count(":") == 1):
            reason += f"; --host takes an address alone, such as 127.0.0.1 or ::1, and {flag} the port"
        raise ConfigError(f"cannot listen on {host}, port {port} (--host, {flag}): {reason}") from error


def listen_at(path: Path) -> socket.socket:
    """Returns a listening Unix socket at `path`; a socket there without a listener is replaced. Raises ConfigError if
    the path is no socket, another server listens at it, or it cannot be made."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        if path.is_dir():
            raise ConfigError(f"--uds: {path} is a folder: name a file in it that is not there yet")
        if path.exists() and not path.is_socket():
            raise ConfigError(f"--uds: {path} is a file, not a socket; name another path")
        if path.is_socket():
            with socket.socket(socket.AF_UNIX) as other:
                if other.connect_ex(str(path)) == 0:
                    raise ConfigError(
                        f"--uds: another server listens at {path}; stop it, or name another path"
                    )
            path.unlink()
        listener.bind(str(path))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--uds: cannot listen at {path}: {error.strerror or error}") from error
    except ConfigError:
        listener.close()
        raise
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    host, port = listener.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def with_addresses(config: ServerConfig, listeners: Sequence[socket.socket]) -> ServerConfig:
    """Returns `config` with the host and port of the listeners. If there are several, the most widely reachable one
    is taken, because the server derives from it which clients to trust."""
    listener = max(listeners, key=_reach)
    if listener.family == socket.AF_UNIX:
        return dataclasses.replace(config, uds=str(listener.getsockname()))
    host, port = listener.getsockname()[:2]
    return dataclasses.replace(config, host=host, port=port, uds=None)


def _reach(listener: socket.socket) -> int:
    if listener.family == socket.AF_UNIX:
        return 0
    return 1 if ipaddress.ip_address(listener.getsockname()[0]).is_loopback else 2
