"""PDF files, written by hand: a page for each text, in a font that every reader has."""

from __future__ import annotations

from collections.abc import Sequence

LINES = 60  # of a page
HELVETICA = "<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>"
# Its characters are told by a table (CMap) that the file names and does not contain.
SONG = (
    "<< /Type /Font /Subtype /Type0 /BaseFont /STSong-Light /Encoding /GBK-EUC-H /DescendantFonts [ << /Type /Font"
    " /Subtype /CIDFontType0 /BaseFont /STSong-Light /CIDSystemInfo << /Registry (Adobe) /Ordering (GB1)"
    " /Supplement 2 >> /FontDescriptor << /Type /FontDescriptor /FontName /STSong-Light /Flags 4"
    " /FontBBox [0 -200 1000 900] /ItalicAngle 0 /Ascent 900 /Descent -200 /StemV 90 >> >> ] >>"
)
# Neither of these is what an empty password makes, so a reader has to ask for one.
LOCKED = (
    "/Encrypt << /Filter /Standard /V 1 /R 2 /P -4 /O <" + "01" * 32 + "> /U <" + "02" * 32 + "> >> "
    "/ID [ <00> <00> ] "
)


def write_pdf(texts: Sequence[str], *, font: str = HELVETICA, trailer: str = "") -> bytes:
    """The file of pages with these ASCII texts, of which one that is "" draws nothing. Lines beyond a page's end are
    drawn over its first ones. `trailer`: more of its fields."""
    pages = [4 + 2 * index for index in range(len(texts))]
    kids = " ".join(f"{page} 0 R" for page in pages)
    objects = [
        "<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [ {kids} ] /Count {len(texts)} /MediaBox [0 0 595 842] >>",
        font,
    ]
    for page, text in zip(pages, texts, strict=True):
        drawn = "".join(
            f"BT /F 12 Tf 50 {800 - 12 * (line % LINES)} Td <{words.encode('ascii').hex()}> Tj ET\n"
            for line, words in enumerate(text.splitlines())
        )
        objects += [
            f"<< /Type /Page /Parent 2 0 R /Resources << /Font << /F 3 0 R >> >> /Contents {page + 1} 0 R >>",
            f"<< /Length {len(drawn)} >>\nstream\n{drawn}\nendstream",
        ]
    written = b"%PDF-1.4\n"
    offsets = []
    for number, body in enumerate(objects, 1):
        offsets.append(len(written))
        written += f"{number} 0 obj\n{body}\nendobj\n".encode()
    entries = "".join(f"{offset:010} 00000 n \n" for offset in offsets)
    table = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{entries}"
    end = f"trailer\n<< /Size {len(objects) + 1} /Root 1 0 R {trailer}>>\nstartxref\n{len(written)}\n%%EOF\n"
    return written + table.encode() + end.encode()
