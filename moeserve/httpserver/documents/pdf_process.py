"""The process that reads untrusted PDFs: `python -m moeserve.httpserver.documents.pdf_process`, in a Sandbox."""

from __future__ import annotations

import codecs
from contextlib import suppress
from typing import Final

import pypdfium2
from pypdfium2 import PdfDocument, PdfiumError

from moeserve.httpserver.documents.pdf_protocol import (
    MAX_PAGES,
    MAX_PDF_BYTES,
    MAX_TEXT_BYTES,
    MOST_MESSAGE,
    Read,
    Refused,
    Reply,
    encode,
)
from moeserve.processes.sandbox import child
from moeserve.processes.sandbox.frames import receive_frame, send_frame

# Address space in addition to the process's own. PDFium unpacks a page's streams; a page of a book takes a few MB.
MEMORY_BYTES: Final = 1 << 30


def main() -> None:
    channel = child.begin("documents")
    _load_the_rest()
    child.confine(MEMORY_BYTES)
    send_frame(channel, encode(Read("")))  # ready
    while True:
        try:
            data = receive_frame(channel, MAX_PDF_BYTES)
        except (EOFError, ConnectionError):
            return
        send_frame(channel, encode(read(data)))


def read(data: bytes) -> Reply:
    """Returns the text of a PDF, in the order in which the file has it. A line `[page 2]` is above each page's text if
    there are several pages; pages without text are left out."""
    try:
        document = PdfDocument(data)
        if document.get_formtype() != pypdfium2.raw.FORMTYPE_NONE:
            document.init_forms()
    except PdfiumError as error:
        return Refused(_explained(error))
    try:
        return _read(document)
    except MemoryError:
        raise  # the process ends: what PDFium has allocated may not come back
    except Exception as error:  # noqa: BLE001  damaged files raise anything
        return Refused(f"cannot be read: {str(error) or type(error).__name__}"[:MOST_MESSAGE])
    finally:
        document.close()


def _read(document: PdfDocument) -> Reply:
    count = len(document)
    if count > MAX_PAGES:
        return Refused(f"has {count} pages; {MAX_PAGES} at most are read")
    pages: list[str] = []
    size = 0
    for number in range(count):
        text = _text_of(document, number)
        size += len(text.encode())
        if size > MAX_TEXT_BYTES:
            return Refused(f"has more than {MAX_TEXT_BYTES >> 20} MiB of text")
        pages.append(text)
    if not any(pages):
        return Refused(
            "has no text: its pages are pictures; send them as pictures, or run a text recognition first"
        )
    if count == 1:
        return Read(pages[0])
    return Read("\n\n".join(f"[page {number}]\n{text}" for number, text in enumerate(pages, 1) if text))


def _text_of(document: PdfDocument, number: int) -> str:
    """Returns a page's text, with what its form's fields have been filled with."""
    page = document[number]
    if document.formenv is not None:
        with suppress(PdfiumError):
            page.flatten()  # makes fields text; the page has to be loaded anew
        page.close()
        page = document[number]
    text = page.get_textpage().get_text_range(errors="replace")
    page.close()  # with its text
    return _cleaned(text)


def _cleaned(text: str) -> str:
    """Returns the text with line feeds only. PDFium joins words that are hyphenated at a line's end, with U+FFFE in the
    place of the hyphen."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").replace("\ufffe", "").replace("\0", "")
    return lines.strip()


def _explained(error: PdfiumError) -> str:
    if error.err_code == pypdfium2.raw.FPDF_ERR_PASSWORD:
        return "is encrypted; send it without a password"
    return "is damaged, or no PDF"


def _load_the_rest() -> None:
    """Loads what is loaded on first use: the texts' encoding, and what PDFium needs for an empty page."""
    codecs.lookup("utf-16-le")
    document = PdfDocument.new()
    document.new_page(10, 10).get_textpage().get_text_range()
    document.close()


if __name__ == "__main__":
    main()
