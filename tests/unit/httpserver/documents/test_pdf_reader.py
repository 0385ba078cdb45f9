"""The process that reads PDFs: its limits, its cache, and files that are cut or changed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import psutil
import pytest

from moeserve.httpserver.documents import pdf_reader
from moeserve.httpserver.documents.pdf_reader import PdfError, PdfReader
from moeserve.processes.sandbox import parent
from tests.support.clients.pdf_files import SONG, write_pdf

BOOK = write_pdf([f"Page {number} tells of foxes." for number in range(5)])


# A page with a text field. PDFium finds the objects of a file whose table is wrong.
FIELD = (
    b"9 0 obj <</Type/Annot/Subtype/Widget/FT/Tx/T(name)/V(Alice Fox)/Rect[50 700 300 720]/P 4 0 R/F 4"
    b"/DA(/F 12 Tf 0 g)>> endobj\n"
)
FORM = (
    write_pdf(["Foxes jump."])
    .replace(b"xref\n0", FIELD + b"xref\n0")
    .replace(b"/Type /Catalog", b"/Type /Catalog /AcroForm <</Fields [9 0 R] /DR <</Font <</F 3 0 R>>>>>>")
    .replace(b"/Type /Page ", b"/Type /Page /Annots [9 0 R] ")
)


class Reading:
    """A PdfReader whose process is known."""

    def __init__(self, **settings: float) -> None:
        self.reader = PdfReader(**settings)
        before = set(psutil.Process().children())
        assert self.read(write_pdf(["Ready."])) == "Ready."
        (self.process,) = set(psutil.Process().children()) - before

    def read(self, data: bytes) -> str:
        return asyncio.run(self.reader.read(data))


@pytest.fixture
def reading() -> Iterator[Reading]:
    reading = Reading()
    yield reading
    reading.reader.close()


def test_lines_and_pages(reading: Reading) -> None:
    assert reading.read(write_pdf(["Foxes\njump."])) == "Foxes\njump."
    assert reading.read(write_pdf(["a", "", "c"])) == "[page 1]\na\n\n[page 3]\nc"


def test_what_a_form_has_been_filled_with(reading: Reading) -> None:
    """A field's value is no part of the page: pypdf and pdf.js leave it out of the text."""
    assert reading.read(FORM) == "Foxes jump.\nAlice Fox"


def test_a_font_of_which_the_file_has_no_table(reading: Reading) -> None:
    """PDFium has the tables of Chinese, Japanese and Korean encodings, and needs no file for them."""
    assert reading.read(write_pdf(["Foxes jump."], font=SONG)) == "Foxes jump."


def test_damaged_files_end_no_process(reading: Reading) -> None:
    """200 files that are cut or have changed bytes: each is read or refused, by one process."""
    drawn = random.Random(5)
    refused = 0
    for _ in range(200):
        data = bytearray(BOOK[: drawn.randrange(9, len(BOOK))] if drawn.random() < 0.3 else BOOK)
        for _ in range(drawn.randrange(1, 30)):
            data[drawn.randrange(9, len(data))] = drawn.randrange(256)
        try:
            assert isinstance(reading.read(bytes(data)), str)
        except PdfError:
            refused += 1
    assert 0 < refused < 200
    assert reading.process.is_running()


def test_a_killed_process_is_replaced(reading: Reading) -> None:
    reading.process.kill()
    assert reading.read(write_pdf(["Foxes jump."])) == "Foxes jump."


def test_a_pdf_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parent, "PATIENCE", 200)  # it gets its CPU time, however busy the machine is
    reader = PdfReader(timeout=0.05)
    try:
        with pytest.raises(PdfError, match=r"takes too long to read: it did not read it within 0\.05 s"):
            asyncio.run(reader.read(write_pdf(["Foxes jump. " * 40] * 1500)))
    finally:
        reader.close()


def test_texts_are_kept_for_their_tenant_up_to_a_size(
    reading: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next turn of a conversation does not wait for the process."""
    monkeypatch.setattr(pdf_reader, "CACHE_BYTES", 3000)
    files = [write_pdf(["x" * 1000 + str(number)]) for number in range(4)]
    for file in files:
        reading.read(file)
    reading.process.suspend()
    try:
        assert reading.read(files[3]).endswith("3")
        assert reading.read(files[2]).endswith("2")
    finally:
        reading.process.resume()
    asked: list[bytes] = []

    def ask(data: bytes) -> str:
        asked.append(data)
        return "read again"

    monkeypatch.setattr(reading.reader, "_ask", ask)
    assert reading.read(files[0]) == "read again"  # was put out
    assert asyncio.run(reading.reader.read(files[3], "another")) == "read again"
    assert asked == [files[0], files[3]]


def test_characters_beyond_16_bits(reading: Reading) -> None:
    """Formulas have such letters. The font's table says that its A is one."""
    table = b"1 begincodespacerange <00> <FF> endcodespacerange 1 beginbfchar <41> <D835DC65> endbfchar"
    stream = b"9 0 obj\n<< /Length %d >>\nstream\n%b\nendstream\nendobj\n" % (len(table), table)
    font = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /ToUnicode 9 0 R >>"
    file = write_pdf(["A is x."], font=font).replace(b"xref\n0", stream + b"xref\n0")
    assert reading.read(file) == "\N{MATHEMATICAL ITALIC SMALL X} is x."
