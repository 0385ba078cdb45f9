"""The vocabulary, the tokenizer and the chat template, all read from the model's file. Each module imports only what it
needs: the detokenizer does not import the tokenizers library, and the template's process does not import numpy."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import TemplateError, TemplateMissing, TemplateTimeout
    from .renderer import ChatRenderer
    from .text_tokenizer import TextTokenizer
    from .vocabulary import Vocabulary

__all__ = [
    "ChatRenderer",
    "TemplateError",
    "TemplateMissing",
    "TemplateTimeout",
    "TextTokenizer",
    "Vocabulary",
]

_MODULES = {
    "ChatRenderer": ".renderer",
    "TemplateError": ".errors",
    "TemplateMissing": ".errors",
    "TemplateTimeout": ".errors",
    "TextTokenizer": ".text_tokenizer",
    "Vocabulary": ".vocabulary",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
