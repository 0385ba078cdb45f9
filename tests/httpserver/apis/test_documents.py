"""Text files and PDFs that clients attach, in the forms of all APIs."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from moeserve.httpserver.generation.request import documents
from tests.support.chats.scripted_answers import prompt_of
from tests.support.clients.pdf_files import LOCKED, write_pdf
from tests.support.servers.http_harness import NAME, HttpServer, tokens_of

TEXT = "Foxes jump.\nDogs lie."
PDF = write_pdf(["Foxes jump.", "Dogs lie."])
IN_PDF = "[page 1]\nFoxes jump.\n\n[page 2]\nDogs lie."
ZIP = b"PK\3\4\x14\0\6\0" + bytes(20)


def encoded(file: bytes) -> str:
    return base64.b64encode(file).decode()


def url(file: bytes, kind: str = "application/pdf") -> str:
    return f"data:{kind};base64,{encoded(file)}"


def chat(server: HttpServer, *parts: Any, role: str = "user") -> Any:
    messages = [{"role": role, "content": list(parts)}]
    if role != "user":
        messages.append({"role": "user", "content": "Go on."})
    return server.post("/v1/chat/completions", {"model": NAME, "max_tokens": 1, "messages": messages})


PARTS: dict[str, dict[str, Any]] = {
    "OpenAI's": {"type": "file", "file": {"filename": "a.pdf", "file_data": url(PDF)}},
    "base64 alone": {"type": "file", "file": {"filename": "a.pdf", "file_data": encoded(PDF)}},
    "OpenRouter's": {"type": "file", "file": {"filename": "a.pdf", "fileData": None, "file_data": url(PDF)}},
    "the AI SDK's": {
        "type": "file",
        "mediaType": "application/pdf",
        "data": encoded(PDF),
        "filename": "a.pdf",
    },
    "the AI SDK's of its page": {
        "type": "file",
        "mediaType": "application/pdf",
        "url": url(PDF),
        "filename": "a.pdf",
    },
    "LangChain's": {
        "type": "file",
        "source_type": "base64",
        "mime_type": "application/pdf",
        "data": encoded(PDF),
        "filename": "a.pdf",
    },
    "LangChain 1.0's": {
        "type": "file",
        "base64": encoded(PDF),
        "mime_type": "application/pdf",
        "extras": {"filename": "a.pdf"},
    },
    "Gemini's": {"inline_data": {"mime_type": "application/pdf", "data": encoded(PDF), "name": "a.pdf"}},
    "Gemini's in LangChain": {
        "type": "media",
        "mime_type": "application/pdf",
        "data": encoded(PDF),
        "name": "a.pdf",
    },
    "Anthropic's": {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)},
        "title": "a.pdf",
    },
    "the Responses API's": {"type": "input_file", "filename": "a.pdf", "file_data": url(PDF)},
    "a URL that is null": {
        "type": "file",
        "mediaType": "application/pdf",
        "data": encoded(PDF),
        "url": None,
        "filename": None,
        "name": "a.pdf",
    },
    "MCP's": {
        "type": "resource",
        "resource": {"uri": "a.pdf", "mimeType": "application/pdf", "blob": encoded(PDF)},
    },
}


@pytest.mark.parametrize("name", PARTS)
def test_a_pdf_in_each_form(server: HttpServer, name: str) -> None:
    answer = chat(server, {"type": "text", "text": "Who?"}, PARTS[name])
    assert answer.status_code == 200, answer.text
    assert f"Who?\n<document>\n<title>a.pdf</title>\n{IN_PDF}\n</document>" in prompt_of(server)


@pytest.mark.parametrize(
    ("file", "kind"),
    [
        (TEXT.encode(), "text/plain"),
        (TEXT.encode(), "application/octet-stream"),
        (b"\xef\xbb\xbf" + TEXT.encode(), "text/csv"),
        (TEXT.encode("utf-16"), "text/plain;charset=utf-16"),
    ],
    ids=["a text", "no type", "a byte order mark", "UTF-16"],
)
def test_a_text_file(server: HttpServer, file: bytes, kind: str) -> None:
    part = {"type": "file", "file": {"filename": "notes.md", "file_data": url(file, kind)}}
    answer = chat(server, part)
    assert answer.status_code == 200, answer.text
    assert f"<document>\n<title>notes.md</title>\n{TEXT}\n</document>" in prompt_of(server)


def test_an_empty_text_file(server: HttpServer) -> None:
    """Such as an `__init__.py` that an agent attaches."""
    part = {"type": "file", "file": {"filename": "__init__.py", "file_data": url(b"", "text/plain")}}
    assert chat(server, part).status_code == 200
    assert "<title>__init__.py</title>\n\n</document>" in prompt_of(server)


@pytest.mark.parametrize("kind", ["text-plain", "file"])
def test_langchains_plain_text(server: HttpServer, kind: str) -> None:
    part = {"type": kind, "text": TEXT, "mime_type": "text/plain", "metadata": {"filename": "a.txt"}}
    assert chat(server, part).status_code == 200
    assert f"<document>\n<title>a.txt</title>\n{TEXT}\n</document>" in prompt_of(server)


def test_a_tools_message_has_documents(server: HttpServer) -> None:
    assert chat(server, PARTS["OpenAI's"], role="tool").status_code == 200
    assert IN_PDF in prompt_of(server)


def test_a_system_message_has_no_pdf(server: HttpServer) -> None:
    """Its text is trusted: control tokens in it are tokens."""
    refused = chat(server, PARTS["OpenAI's"], role="system")
    assert refused.status_code == 400
    assert "messages of role system cannot contain pictures and PDFs" in refused.json()["error"]["message"]


def test_anthropics_document_and_result(server: HttpServer) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": encoded(PDF)}
    block = {"type": "document", "source": source, "title": "Foxes", "context": "A tale."}
    result = {"type": "tool_result", "tool_use_id": "x", "content": [{"type": "document", "source": source}]}
    body = {"model": NAME, "max_tokens": 1, "messages": [{"role": "user", "content": [result, block]}]}
    answer = server.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    prompt = prompt_of(server)
    assert f"<document>\n<title>Foxes</title>\n<context>A tale.</context>\n{IN_PDF}\n</document>" in prompt
    assert f"<tool_response>\n<document>\n{IN_PDF}\n</document>" in prompt
    counted = server.post("/v1/messages/count_tokens", {"model": NAME, "messages": body["messages"]}).json()
    assert counted["input_tokens"] == len(tokens_of(server.requests[-1]))


def test_a_file_of_the_responses_api_and_the_turn_after(server: HttpServer) -> None:
    file = {"type": "input_file", "filename": "a.pdf", "file_data": url(PDF), "detail": "high"}
    body = {"model": NAME, "max_output_tokens": 1, "input": [{"role": "user", "content": [file]}]}
    first = server.post("/v1/responses", body)
    assert first.status_code == 200, first.text
    assert f"<title>a.pdf</title>\n{IN_PDF}\n</document>" in prompt_of(server)
    second = {
        "model": NAME,
        "max_output_tokens": 1,
        "previous_response_id": first.json()["id"],
        "input": "Who?",
    }
    assert server.post("/v1/responses", second).status_code == 200
    assert IN_PDF in prompt_of(server)
    output = {"type": "function_call_output", "call_id": "c", "output": [file]}
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    answer = server.post("/v1/responses", body | {"input": [call, output]})
    assert answer.status_code == 200, answer.text
    assert IN_PDF in prompt_of(server)


def test_the_rendered_prompt_and_its_tokens_have_the_text(server: HttpServer) -> None:
    messages = [{"role": "user", "content": [PARTS["OpenAI's"]]}]
    assert IN_PDF in server.post("/apply-template", {"messages": messages}).json()["prompt"]
    counted = server.post("/tokenize", {"messages": messages}).json()["count"]
    assert chat(server, PARTS["OpenAI's"]).status_code == 200
    assert counted == len(tokens_of(server.requests[-1]))


def test_a_mark_in_a_pdf_is_text(server: HttpServer) -> None:
    """What stands in a message for another PDF's text, if a PDF could spell it."""
    mark = documents._MARK + "0" * 16
    part = {"type": "file", "file": {"file_data": url(write_pdf([mark]))}}
    assert chat(server, part, PARTS["OpenAI's"]).status_code == 200
    assert f"<document>\n{mark}\n</document>" in prompt_of(server)


def test_texts_that_cannot_fit_are_refused_before_they_are_joined(server: HttpServer) -> None:
    """A body of 32 small files could otherwise make 256 MiB of text."""
    part = {"type": "file", "file": {"file_data": url(write_pdf(["Foxes jump. " * 4000]))}}
    answer = chat(server, *[part] * 32)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "characters cannot fit" in answer.json()["error"]["message"]


def test_a_program_that_reads_pdfs_is_a_text(server: HttpServer) -> None:
    text = 'HEADER = b"%PDF-"'
    part = {"type": "file", "file": {"filename": "a.py", "file_data": url(text.encode())}}
    assert chat(server, part).status_code == 200
    assert f"<title>a.py</title>\n{text}\n</document>" in prompt_of(server)


def test_a_pdf_behind_other_bytes(server: HttpServer) -> None:
    """As mail programs write them."""
    part = {"type": "file", "file": {"file_data": url(b"\xff\xfe mail\r\n" + PDF)}}
    assert chat(server, part).status_code == 200
    assert IN_PDF in prompt_of(server)


REFUSED: list[tuple[Any, str]] = [
    (
        {"file_data": url(ZIP)},
        "the file is a ZIP archive, as .docx, .xlsx and .pptx files are, which is not read",
    ),
    ({"file_data": url(b"\xff\xfe\x00")}, "neither a PDF nor text in UTF-8"),
    ({"file_data": url(b"\xe9t\xe9", "text/plain")}, "neither a PDF nor text in UTF-8"),
    ({"file_data": url(b"a\0b")}, "it has zero bytes"),
    ({"file_data": "???"}, "the file is not valid base64"),
    ({"file_id": "file-1"}, "needs its file in base64 as file.file_data"),
    ({"file_data": "https://example.org/a.pdf"}, "the file is an address, which is not fetched"),
    ({"file_data": url(write_pdf([""]))}, "the PDF has no text: its pages are pictures"),
    ({"file_data": url(b"%PDF-1.7\n" + bytes(100))}, "the PDF is damaged, or no PDF"),
    (
        {"file_data": url(write_pdf(["A secret."], trailer=LOCKED))},
        "the PDF is encrypted; send it without a password",
    ),
    ({"file_data": url(write_pdf(["a"] * 2001))}, "the PDF has 2001 pages; 2000 at most are read"),
]


@pytest.mark.parametrize(("file", "why"), REFUSED, ids=[why for _, why in REFUSED])
def test_a_file_that_is_not_read(server: HttpServer, file: dict[str, Any], why: str) -> None:
    answer = chat(server, {"type": "file", "file": {"filename": "a"} | file})
    assert answer.status_code == 400
    assert why in answer.json()["error"]["message"]


def test_a_file_by_url_is_not_fetched(server: HttpServer) -> None:
    part = {"type": "file", "mediaType": "application/pdf", "url": "https://example.org/a.pdf"}
    answer = chat(server, part)
    assert answer.status_code == 400
    assert "is an address, which is not fetched" in answer.json()["error"]["message"]


def test_of_several_pdfs_the_bad_one_is_named(server: HttpServer) -> None:
    bad = {"type": "file", "file": {"file_data": url(b"%PDF-1.7 nothing")}}
    answer = chat(server, PARTS["OpenAI's"], bad)
    assert answer.status_code == 400
    assert "PDF 2 of 2 is damaged" in answer.json()["error"]["message"]
