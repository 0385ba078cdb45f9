"""Where a server is asked to listen: addresses, the port of the health checks, systemd's sockets."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.processes.listeners import listen, open_listeners, url_of


def test_two_colons_are_both_families() -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    with listen("::", 0) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            with socket.create_connection((host, port), timeout=30):
                pass
        assert url_of(listener) == f"http://[::]:{port}"
    with listen("::1", 0) as listener, pytest.raises(ConnectionError):
        socket.create_connection(("127.0.0.1", listener.getsockname()[1]), timeout=30)


def test_the_health_port_is_another_than_the_apis() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    with pytest.raises(ConfigError, match=f"--health-port: {port} is --port too: choose another"):
        open_listeners(ServerConfig(port=port, health_port=port))


@pytest.mark.parametrize("host", ["http://127.0.0.1", "127.0.0.1:8000", "[::1]"])
def test_an_address_with_more_than_the_host(host: str) -> None:
    with pytest.raises(ConfigError, match=r"--host takes an address alone, such as .*, and --port the port"):
        listen(host, 0)


def test_sockets_that_systemd_has_opened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        program = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3);"
            "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'};"
            "from moeserve.config import ServerConfig;"
            "from moeserve.processes.listeners import open_listeners, with_addresses;"
            "config = ServerConfig(uds='/x'); found = open_listeners(config); made = with_addresses(config, found.api);"
            "print(len(found.api), made.host, made.port, made.uds, found.api[0].get_inheritable())"
        )
        result = subprocess.run(
            [sys.executable, "-c", program, str(listener.fileno())],
            pass_fds=[listener.fileno()],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
        )
        assert result.stdout == f"1 127.0.0.1 {listener.getsockname()[1]} None False\n", result.stderr
