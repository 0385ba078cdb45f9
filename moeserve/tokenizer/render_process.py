"""The process that renders one chat template: `python -m moeserve.tokenizer.render_process`, in a Sandbox."""

from __future__ import annotations

from contextlib import suppress

from moeserve.processes.sandbox import child
from moeserve.processes.sandbox.frames import receive_frame, send_frame

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
)

MEMORY_BYTES = 512 << 20  # address space beyond what the process uses when it is ready


def main() -> None:
    channel = child.begin("template")
    _import_the_rest()
    child.confine(MEMORY_BYTES)
    send_frame(channel, encode(Rendered("")))  # ready
    template = with_tools = None
    max_chars = 0
    while True:
        try:
            request = decode_request(receive_frame(channel, MAX_REQUEST_BYTES))
        except (EOFError, ConnectionError):
            return
        reply: Reply
        try:
            if isinstance(request, Compile):
                template = with_tools = ChatTemplate(request.source, request.variables)
                if request.tool_source is not None:
                    with_tools = ChatTemplate(request.tool_source, request.variables)
                max_chars = request.max_output_chars
                reply = Rendered("")
            else:
                reply = Rendered(_render(with_tools if request.tools else template, request, max_chars))
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


def _import_the_rest() -> None:
    """Imports modules that Python and jinja load on first use (codecs, error reporting, the time zone), while files can
    still be opened."""
    source = r"{{ strftime_now('%Z\n') }}{{ [] | pprint }}{{ lipsum(1) }}{{ raise_exception('\u20ac') }}"
    with suppress(TemplateError):
        ChatTemplate(source, {}).render([])


if __name__ == "__main__":
    main()
