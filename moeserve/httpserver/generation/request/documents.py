"""Documents in conversations: text files and PDFs. The model sees a document's text between tags.

A text file is decoded at once. A random mark stands for a PDF's text in its message, until the PDF has been read
(`generation/chat/pdf_texts.py`).
"""

from __future__ import annotations

import codecs
import re
import secrets
from dataclasses import dataclass, field
from typing import Any, Final

from pydantic_core import PydanticCustomError

from moeserve.httpserver.generation.request.data_urls import base64_bytes

_MARK: Final = secrets.token_hex(16)  # begins every mark of this process
MARKS: Final = re.compile(f"{_MARK}[0-9a-f]{{16}}")
_ADDRESS: Final = re.compile("https?://", re.IGNORECASE)
_PDF: Final = b"%PDF-"
_HEADER_BYTES: Final = 1024  # in which readers look for a PDF's header (ISO 32000-1, Annex H, note 13)
_BEFORE_HEADER: Final = codecs.BOM_UTF8 + b" \t\r\n\0"
MOST_NAME: Final = 512  # characters of a file's name
_ENCODINGS: Final = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Other files that clients send, by their first bytes.
_OTHERS: Final = {
    b"PK\3\4": "a ZIP archive, as .docx, .xlsx and .pptx files are",
    b"\xd0\xcf\x11\xe0": "an old Office file",
    b"\x1f\x8b": "compressed",
    b"{\\rtf": "RTF",
}


@dataclass(frozen=True, slots=True, eq=False)
class PdfFile:
    """A PDF as the client sent it."""

    data: bytes
    mark: str = field(init=False)  # stands for its text

    def __post_init__(self) -> None:
        object.__setattr__(self, "mark", _MARK + secrets.token_hex(8))


@dataclass(frozen=True, slots=True)
class Document:
    """A document's text, or the mark that stands for it."""

    text: str  # a PDF's mark, if it is one
    pdf: PdfFile | None = None


def document_of_base64(data: str) -> Document:
    """Reads a text file, or takes a PDF. data: base64, or a data: URL. Raises PydanticCustomError for other files."""
    if _ADDRESS.match(data):
        raise PydanticCustomError(
            "document", "the file is an address, which is not fetched; send the file in base64"
        )
    file = base64_bytes(data, "file", may_be_empty=True)
    if _is_pdf(file):
        pdf = PdfFile(file)
        return Document(pdf.mark, pdf)
    return Document(_decoded(file))


def in_tags(tag: str, about: dict[str, str | None], text: str) -> str:
    """Returns the text between tags, after one line for each fact about it."""
    lines = [f"<{name}>{value}</{name}>" for name, value in about.items() if value]
    return "\n".join([f"<{tag}>", *lines, text, f"</{tag}>"])


def titled(name: Any, document: Document) -> Document:
    """Returns a document between tags, with the name of its file above the text. A name that is not a string is left
    out."""
    title = name[:MOST_NAME] if isinstance(name, str) else None
    return Document(in_tags("document", {"title": title}, document.text), document.pdf)


def _is_pdf(file: bytes) -> bool:
    """A text that mentions a PDF's header, such as a program that reads PDFs, is a text."""
    if file[:_HEADER_BYTES].lstrip(_BEFORE_HEADER).startswith(_PDF):
        return True
    return _PDF in file[:_HEADER_BYTES] and not _is_utf8(file)


def _is_utf8(file: bytes) -> bool:
    try:
        file.decode()
    except UnicodeDecodeError:
        return False
    return True


def _decoded(file: bytes) -> str:
    """Decodes UTF-8, or UTF-16 with a byte order mark. Raises PydanticCustomError."""
    encoding = next((name for mark, name in _ENCODINGS.items() if file.startswith(mark)), "utf-8")
    kind = next((name for begin, name in _OTHERS.items() if file.startswith(begin)), None)
    if kind is None:
        try:
            text = file.decode(encoding)
        except UnicodeDecodeError:
            kind = "neither a PDF nor text in UTF-8"
        else:
            if "\0" not in text:
                return text
            kind = "not a text: it has zero bytes"
    message = "the file is {kind}, which is not read; send its text, or a PDF of it"
    raise PydanticCustomError("document", message, {"kind": kind})
