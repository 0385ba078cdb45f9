"""Renders a chat template as Hugging Face's `apply_chat_template` does.

A template is a program from an untrusted file. Jinja's sandbox keeps it from Python's internals, but does not stop
endless loops or allocations. So a server renders with `renderer.ChatRenderer`, in another process.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from .errors import TemplateError

MAX_MESSAGE_CHARS = 2000  # of an error's text
_LIST_METHODS = frozenset({"append", "extend", "insert", "pop"})


class ChatTemplate:
    """A compiled template. The constructor raises TemplateError if it cannot be compiled."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """`variables`: variables of every render, such as bos_token and eos_token."""
        self._variables = dict(variables)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(
                f"the chat template has an error in line {error.lineno}: {_text_of(error)}; name a mended one with "
                "--chat-template"
            ) from error
        except Exception as error:  # jinja and Python's compiler can refuse a program in many ways
            raise TemplateError(
                f"the chat template cannot be compiled: {_reason(error)}; name a mended one with "
                "--chat-template"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        kwargs: Mapping[str, Any] | None = None,
        max_chars: int = 1 << 24,
    ) -> str:
        """Returns the prompt. Raises TemplateError if the template raises an error, fails, or writes more than
        `max_chars`."""
        variables = {
            **self._variables,
            **(kwargs or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(variables):
                size += len(piece)
                if size > max_chars:
                    raise TemplateError(
                        f"the chat template wrote more than {max_chars} characters; shorten the messages"
                    )
                pieces.append(piece)
            text = "".join(pieces)
            text.encode("utf-8")
        except TemplateError:
            raise
        except _Refused as error:
            raise TemplateError(_text_of(error)) from error
        except Exception as error:  # the template is a program: it can raise anything
            raise TemplateError(f"the chat template failed: {_reason(error)}") from error
        return text


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`; the text is the template's message to the client."""


class _Generation(jinja2.ext.Extension):
    """Accepts {% generation %} … {% endgeneration %}, which marks an assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012  jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """namespace() without attributes that begin with an underscore, so that none can pose as a Python internal."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be an attribute's name
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(
            f"namespace attributes may not begin with an underscore: {name!r}"
        )


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Lets templates append to lists and set items, as llama.cpp's own templates do. This is safe because all objects
    within their reach were made for one render."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if type(obj) is list and attr in _LIST_METHODS:
            return True
        return super().is_safe_attribute(obj, attr, value)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns plain JSON; jinja's own filter escapes HTML."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=_plain,
    )


def _plain(value: Any) -> Any:
    """Returns the list that `map` and `select` yield, and null for an undefined variable, as llama.cpp's templates
    expect. Raises TypeError for anything else that JSON cannot express."""
    if isinstance(value, jinja2.Undefined):
        return None
    if isinstance(value, Generator):
        return list(value)
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _raise_exception(message: object) -> NoReturn:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)  # local time, as in Hugging Face's


def _reason(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "it needs more memory than a template is given"
    return f"{type(error).__name__}: {_text_of(error)}"


def _text_of(error: BaseException) -> str:
    """Returns the error's text, shortened, without characters that UTF-8 cannot represent."""
    return str(error)[:MAX_MESSAGE_CHARS].encode("utf-8", errors="replace").decode("utf-8")
