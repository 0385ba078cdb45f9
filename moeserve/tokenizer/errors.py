"""The errors of rendering a chat template."""

from __future__ import annotations

from moeserve.errors import UserError


class TemplateError(UserError):
    """The template refused the messages or failed on them: a client's error, the text is for the client."""


class TemplateMissing(TemplateError):
    """The model's GGUF carries no chat template."""


class TemplateTimeout(TemplateError):
    """The template did not finish in time and its process was killed."""
