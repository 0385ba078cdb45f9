"""`moeserve worker`: the command line."""

from __future__ import annotations

import argparse
import logging
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from moeserve.cli.command_line import add_shared_options, read_options, resolve
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError, UserError
from moeserve.launcher.exit_codes import EXIT_FAILED, EXIT_USAGE
from moeserve.remote.options import parse_address, worker_options
from moeserve.remote.tls import gate_context
from moeserve.remote.tls_files import TlsFiles

BACKLOG: Final = 64

log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Runs the worker. Exit codes: those of the server."""
    parser = command_parser()
    args = parser.parse_args(arguments)
    from moeserve.processes.logs import set_up_logging

    try:
        asked = read_options({name: getattr(args, name) for name in worker_options()}, os.environ)
        address = parse_address(args.listen, "--listen")
    except UserError as error:
        parser.error(str(error))
    set_up_logging("worker host", asked.log_level, asked.log_format)
    files = TlsFiles(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    try:
        return serve(resolve(asked), address, files)
    except ConfigError as error:
        log.error("%s", error)
        return EXIT_USAGE
    except (UserError, OSError) as error:
        log.error("%s", error)
        return EXIT_FAILED


def serve(config: ServerConfig, address: tuple[str, int], files: TlsFiles) -> int:
    """Runs until it is stopped or fails, and returns the exit code. Raises ConfigError, ModelError."""
    from setproctitle import setproctitle

    from moeserve.launcher.runtime_directory import runtime_directory
    from moeserve.models.open import open_metadata
    from moeserve.processes.limits import prepare_limits
    from moeserve.processes.runtime_paths import RuntimePaths
    from moeserve.remote.fingerprint import fingerprint
    from moeserve.remote.host import WorkerHost

    setproctitle("moeserve: worker host")
    prepare_limits(config.threads)
    context = gate_context(files, "--ssl-")  # checked before anything listens
    print_of_model = fingerprint(open_metadata(Path(config.model)))
    with ExitStack() as stack:
        listener = stack.enter_context(listen(*address))
        paths = RuntimePaths(stack.enter_context(runtime_directory()))
        return WorkerHost(config, print_of_model, listener, context, paths, stack).run()


def listen(host: str, port: int) -> socket.socket:
    """Returns the listening socket. Raises ConfigError if the address cannot be listened at."""
    try:
        family, _, _, _, at = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(at[:2], family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror or error}; name another address with --listen"
        ) from error


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve worker",
        description=(
            "Load a model on this machine and compute for a server on another one, which was started with --worker "
            "and this machine's address. Both need a certificate."
        ),
        allow_abbrev=False,
    )
    network = parser.add_argument_group("Network")
    for flag, metavar, text in (
        (
            "--listen",
            "HOST:PORT",
            "address and TCP port for the server to connect to; 0: a free port, which is logged; required",
        ),
        (
            "--ssl-certfile",
            "PATH",
            "this worker's certificate (PEM); it must name the host or address in the server's --worker; required",
        ),
        (
            "--ssl-ca-certs",
            "PATH",
            "certificates (PEM) of the authority that must have signed the server's certificate; other servers are "
            "refused; required",
        ),
    ):
        network.add_argument(flag, metavar=metavar, required=True, help=text)
    network.add_argument(
        "--ssl-keyfile", metavar="PATH", help="the certificate's private key (default: in the same file)"
    )
    add_shared_options(parser, worker_options())
    return parser
