"""Puts the texts of a conversation's PDFs in the places of their marks."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Final

from moeserve.httpserver.documents.pdf_reader import PdfError, PdfReader
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt
from moeserve.httpserver.generation.request.documents import MARKS
from moeserve.httpserver.transport.errors import invalid

MOST_PDFS: Final = 32  # of a conversation


async def with_pdf_texts(
    text: ModelText, limit: int, asked: Asked, prompt: ChatPrompt, reader: PdfReader
) -> ChatPrompt:
    """Returns the conversation with the texts of its PDFs. Raises ApiError 400 for a PDF that cannot be read and for
    texts that cannot fit into `limit` tokens, and SandboxUnavailable."""
    if not prompt.pdfs:
        return prompt
    if len(prompt.pdfs) > MOST_PDFS:
        raise invalid(asked.prompt_param, f"has {len(prompt.pdfs)} PDFs; at most {MOST_PDFS} are taken")
    texts = {}
    for number, pdf in enumerate(prompt.pdfs, 1):
        try:
            texts[pdf.mark] = await reader.read(pdf.data, asked.caller.tenant)
        except PdfError as error:
            which = "the PDF" if len(prompt.pdfs) == 1 else f"PDF {number} of {len(prompt.pdfs)}"
            raise invalid(asked.prompt_param, f"{which} {error}") from error
        text.check_size(sum(map(len, texts.values())), limit, asked.prompt_param)
    return replace(prompt, messages=[_filled(message, texts) for message in prompt.messages], pdfs=())


def _filled(message: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    def text_of(mark: re.Match[str]) -> str:
        return texts[mark[0]]

    return {
        name: MARKS.sub(text_of, value) if isinstance(value, str) else value
        for name, value in message.items()
    }
