"""The process that renders one chat template: `python -m moeserve.tokenizer.render_process`, stdin a socket.

Started by renderer.ChatRenderer, which kills it when a render takes too long. Before it sees the template
it gives up what a template has no use for: more memory than a fixed amount, opening any file or socket, core
dumps. It dies with the thread that started it.
"""

from __future__ import annotations

import ctypes
import resource
import signal
import socket
from contextlib import suppress

import setproctitle

from .chat_template import ChatTemplate
from .errors import TemplateError
from .render_protocol import (
    MAX_REQUEST_BYTES,
    Compile,
    Failed,
    Render,
    Rendered,
    Reply,
    decode_request,
    encode,
    receive_frame,
    send_frame,
)

MEMORY_BYTES = 512 << 20  # address space beyond what the process needs to be there at all

_PR_SET_PDEATHSIG = 1


def main() -> None:
    setproctitle.setproctitle("moeserve: template")
    channel = socket.socket(fileno=0)
    _die_with_parent()
    _import_the_rest()
    _confine()
    send_frame(channel, encode(Rendered("")))  # ready
    template: ChatTemplate | None = None
    max_chars = 0
    while True:
        try:
            request = decode_request(receive_frame(channel, MAX_REQUEST_BYTES))
        except (EOFError, ConnectionError):
            return
        reply: Reply
        try:
            if isinstance(request, Compile):
                template, max_chars = (
                    ChatTemplate(request.source, request.variables),
                    request.max_output_chars,
                )
                reply = Rendered("")
            else:
                reply = Rendered(_render(template, request, max_chars))
        except TemplateError as error:
            reply = Failed(str(error))
        send_frame(channel, encode(reply))


def _render(template: ChatTemplate | None, request: Render, max_chars: int) -> str:
    assert template is not None, "Compile comes first"
    return template.render(
        request.messages,
        tools=request.tools,
        add_generation_prompt=request.add_generation_prompt,
        kwargs=request.kwargs,
        max_chars=max_chars,
    )


def _die_with_parent() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they reach whole groups; the parent alone decides
        signal.signal(number, signal.SIG_IGN)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _import_the_rest() -> None:
    """Python and jinja load codecs, error reporting and the time zone on first use: now, while files can be
    opened."""
    source = r"{{ strftime_now('%Z\n') }}{{ [] | pprint }}{{ lipsum(1) }}{{ raise_exception('\u20ac') }}"
    with suppress(TemplateError):
        ChatTemplate(source, {}).render([])


def _confine() -> None:
    with open("/proc/self/statm", encoding="ascii") as statm:
        in_use = int(statm.read().split()[0]) * resource.getpagesize()
    limit = in_use + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))  # the socket, stdout and stderr: no descriptor is left


if __name__ == "__main__":
    main()
