"""The files that a body brings with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from moeserve.httpserver.generation.request.documents import Document, PdfFile
from moeserve.httpserver.generation.request.pictures import Picture, PicturedText


def pictures_in(value: Any) -> list[Picture]:
    """Returns the pictures in a body or a list of bodies, in their order."""
    return [one for one in _files_in(value) if isinstance(one, Picture)]


def pdfs_in(value: Any) -> list[PdfFile]:
    """Returns the PDFs in a body or a list of bodies, in their order."""
    return [one for one in _files_in(value) if isinstance(one, PdfFile)]


def _files_in(value: Any) -> Iterator[Picture | PdfFile]:
    match value:
        case Picture() | PdfFile():
            yield value
        case Document(pdf=PdfFile() as pdf):
            yield pdf
        case PicturedText():
            yield from value.pictures
            yield from value.pdfs
        case list():
            for one in value:
                yield from _files_in(one)
        case BaseModel():
            for one in value.__dict__.values():
                yield from _files_in(one)
