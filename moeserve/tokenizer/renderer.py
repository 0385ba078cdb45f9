"""Renders an untrusted chat template in a process of its own, within a time, a memory and an output limit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from moeserve.models.errors import ModelError
from moeserve.models.sources.source import ModelSource
from moeserve.processes.sandbox.parent import (
    Sandbox,
    SandboxDied,
    SandboxLost,
    SandboxTimeout,
    SandboxUnavailable,
)

from .errors import TemplateError, TemplateMissing, TemplateTimeout
from .render_protocol import (
    MAX_REQUEST_BYTES,
    Compile,
    Failed,
    Render,
    RenderRequest,
    decode_reply,
    encode,
)
from .vocabulary import Vocabulary

T = TypeVar("T")

_TEMPLATE = "tokenizer.chat_template"
_TOOL_TEMPLATE = "tokenizer.chat_template.tool_use"  # Hugging Face's name: for conversations with tools
MAX_TEMPLATE_BYTES = 1 << 20
TIMEOUT_S = 2.0  # of CPU time, for each render
# Variables of a template that come from elsewhere than chat_template_kwargs.
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_DIED = "the chat template's process ended unexpectedly; the template may need too much memory"


class ChatRenderer:
    """Renders one template in one process, one render at a time; other renders wait in line.

    A render that takes too long is ended by killing the process; the next render starts a new one (0.1 s).
    """

    def __init__(
        self,
        source: str | None,
        variables: Mapping[str, str],
        *,
        tool_source: str | None = None,
        timeout: float = TIMEOUT_S,
        max_output_chars: int = 1 << 24,
    ) -> None:
        """Starts the process and compiles the template; without one (`source` None) every render says so.

        `tool_source` is the template of conversations with tools, if that is another. `variables` are bos_token and
        the like; `timeout` is in seconds of CPU time, for compiling and for each render. Raises TemplateError (a syntax
        error, with its line), TemplateTimeout or SandboxUnavailable.
        """
        self._source = source
        self._tool_source = tool_source
        self._variables = dict(variables)
        self._max_output_chars = max_output_chars
        self._sandbox = Sandbox(
            "moeserve.tokenizer.render_process",
            "chat templates",
            timeout=timeout,
            max_reply_bytes=4 * max_output_chars + 64,  # UTF-8, and the struct around it
        )
        if source is not None:
            try:
                self._sandbox.run_sync(lambda: self._twice(self._start))
            except BaseException:  # not swallowed: only the thread is given back first
                self._sandbox.close()
                raise

    @classmethod
    def from_gguf(
        cls,
        gguf: ModelSource,
        vocabulary: Vocabulary,
        *,
        timeout: float = TIMEOUT_S,
        template: str | None = None,
    ) -> ChatRenderer:
        """Returns a renderer of `template`; if it is None, of the file's own templates: tokenizer.chat_template, and
        for conversations with tools tokenizer.chat_template.tool_use, if the file has that.

        A file without a template is served too; no default is assumed for it, since a wrong format would only show as
        poor answers. Raises ModelError, also for a template that cannot be compiled in time.
        """
        source, tool_source = template, None
        if template is None:
            source, tool_source = (_template(gguf, key) for key in (_TEMPLATE, _TOOL_TEMPLATE))
            source = tool_source if source is None else source
        try:
            return cls(source, _special_tokens(gguf, vocabulary), tool_source=tool_source, timeout=timeout)
        except TemplateError as error:
            raise ModelError(gguf.path, str(error)) from error

    @property
    def source(self) -> str | None:
        """Returns the template, if there is one."""
        return self._source

    def source_for(self, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        """Returns the template for a conversation with these tools."""
        return self._tool_source if tools and self._tool_source is not None else self._source

    @property
    def sources(self) -> list[str]:
        """Returns all templates, first the one for tools."""
        return [source for source in (self._tool_source, self._source) if source is not None]

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        tenant: str = "",
    ) -> str:
        """Returns the prompt text for `messages` (OpenAI's form). Raises TemplateError and its subclasses, or
        SandboxUnavailable if the template is not the cause.

        `kwargs` is the request's chat_template_kwargs. Tenants take turns.
        """
        frame = self._frame(messages, tools, add_generation_prompt, kwargs)
        return await self._sandbox.run(lambda: self._exchange(frame), tenant)

    def render_now(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Does what `render` does, but blocks: do not call it on an event loop's thread."""
        frame = self._frame(messages, tools, True, kwargs)
        return self._sandbox.run_sync(lambda: self._exchange(frame))

    def close(self) -> None:
        """Ends the process, after a render that is under way."""
        self._sandbox.close()

    def _frame(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        kwargs: Mapping[str, Any] | None,
    ) -> bytes:
        if self._source is None:
            raise TemplateMissing(
                f"this model's GGUF carries no chat template ({_TEMPLATE}); format the prompt yourself and "
                "use /v1/completions"
            )
        taken = RESERVED & (kwargs or {}).keys()
        if taken:
            raise TemplateError(
                f"chat_template_kwargs may not set {', '.join(sorted(taken))}; leave them out"
            )
        plain_tools = None if tools is None else [dict(tool) for tool in tools]
        return _encode(
            Render([dict(m) for m in messages], plain_tools, add_generation_prompt, dict(kwargs or {}))
        )

    # ---- all below runs on the sandbox's thread

    def _start(self) -> None:
        """Starts the process and compiles the template. Raises SandboxLost, SandboxUnavailable, TemplateError."""
        assert self._source is not None
        self._sandbox.start()
        try:
            compiled = Compile(self._source, self._variables, self._max_output_chars, self._tool_source)
            self._request(_encode(compiled), "compile")
        except TemplateError:
            self._sandbox.stop()
            raise

    def _exchange(self, frame: bytes) -> str:
        return self._twice(lambda: self._render(frame))

    def _twice(self, work: Callable[[], T]) -> T:
        """Asks a second process if the first is lost, because the first may have been killed for another reason than
        this template."""
        try:
            return work()
        except SandboxLost:
            pass
        try:
            return work()
        except SandboxDied as error:
            raise TemplateError(_DIED) from error
        except SandboxLost as error:
            raise SandboxUnavailable(f"the process for chat templates {error}") from error

    def _render(self, frame: bytes) -> str:
        """Renders once. Raises the errors of `_start`."""
        if not self._sandbox.is_running:
            self._start()
        return self._request(frame, "finish")

    def _request(self, frame: bytes, stage: str) -> str:
        """Sends a request and returns its reply. Raises the errors of `_start`."""
        try:
            reply = decode_reply(self._sandbox.ask(frame, stage))
        except SandboxTimeout as error:
            raise TemplateTimeout(f"the chat template {error}") from error
        except ValueError as error:  # msgspec's
            self._sandbox.stop()
            raise SandboxDied from error
        if isinstance(reply, Failed):
            raise TemplateError(reply.message)
        return reply.text


def _template(gguf: ModelSource, key: str) -> str | None:
    if key not in gguf.metadata:
        return None
    source = gguf.metadata.require_str(key)
    if len(source) > MAX_TEMPLATE_BYTES:
        raise gguf.metadata.error(
            key, f"has {len(source)} characters; {MAX_TEMPLATE_BYTES} at most are supported"
        )
    return source


def _encode(request: RenderRequest) -> bytes:
    try:
        frame = encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TemplateError(f"the messages cannot be passed to the chat template: {error}") from error
    if len(frame) > MAX_REQUEST_BYTES:
        raise TemplateError(
            f"the messages take {len(frame)} bytes; {MAX_REQUEST_BYTES} at most are supported; shorten them"
        )
    return frame


def _special_tokens(gguf: ModelSource, vocabulary: Vocabulary) -> dict[str, str]:
    """Returns Hugging Face's template variables for the tokens that the file names."""
    keys = {
        "bos_token": "tokenizer.ggml.bos_token_id",
        "eos_token": "tokenizer.ggml.eos_token_id",
        "pad_token": "tokenizer.ggml.padding_token_id",
        "unk_token": "tokenizer.ggml.unknown_token_id",
    }
    ids = {
        name: gguf.metadata.require_int(key, 0, vocabulary.size - 1)
        for name, key in keys.items()
        if key in gguf.metadata
    }
    return {
        name: vocabulary.token_bytes[token_id].decode("utf-8", "replace") for name, token_id in ids.items()
    }
