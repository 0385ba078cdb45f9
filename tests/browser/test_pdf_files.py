"""PDF files that go with a question: the browser reads their text, and what has none is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, FilePayload, Page, Request, expect

from tests.browser.conftest import Screenshot, ask
from tests.support.chats.scripted_answers import prompt_of
from tests.support.clients.pdf_files import LOCKED, SONG, write_pdf
from tests.support.nightly import nightly_after
from tests.support.servers.http_harness import HttpServer, http_server, say


@pytest.fixture(scope="module")
def server() -> Iterator[HttpServer]:
    with http_server(context=1 << 14) as running:
        running.answer = say("one")
        yield running


def attach(page: Page, **files: bytes) -> None:
    """Each as NAME.pdf."""
    payloads = [
        FilePayload(name=f"{name}.pdf", mimeType="application/pdf", buffer=body)
        for name, body in files.items()
    ]
    page.locator("#chooser").set_input_files(payloads)


def test_the_text_of_a_pdf_goes_with_a_question(
    page: Page, server: HttpServer, screenshot: Screenshot
) -> None:
    loaded: list[str] = []

    def note(request: Request) -> None:
        loaded.append(request.url)

    page.on("request", note)
    page.goto(server.url)
    expect(page.locator("#welcome-model")).to_contain_text("tokens of context")
    assert not [url for url in loaded if "/vendor/pdf" in url], "only who attaches one waits for it"
    attach(page, foxes=write_pdf(["Five foxes (and a hen)", "", "The end."]), plain=write_pdf(["Once."]))
    files = page.locator("#files li")
    expect(files.nth(0)).to_contain_text("foxes.pdf, 50 characters")
    expect(files.nth(1)).to_contain_text("plain.pdf, 14 characters")
    expect(page.locator("#notice")).to_contain_text("foxes.pdf: no text on page 2")
    screenshot(page, "pdf-attached")
    ask(page, "How many?")
    expect(files).to_have_count(0)
    expected = "foxes.pdf:\n```\n[page 1]\nFive foxes (and a hen)\n\n[page 3]\nThe end.\n```\n\n"
    assert f"{expected}plain.pdf:\n```\n[page 1]\nOnce.\n```\n\nHow many?" in prompt_of(server)
    page.locator(".file summary").first.click()
    expect(page.locator(".file pre").first).to_contain_text("The end.")
    screenshot(page, "pdf-sent")
    assert all(url.startswith(server.url) for url in loaded)


@pytest.mark.slow
def test_a_pdf_that_a_browser_printed(browser: Browser, page: Page, server: HttpServer) -> None:
    """With fonts of its own in it, compressed, of letters beyond ASCII."""
    other = browser.new_page()
    other.set_content(
        "<h1>Über Füchse</h1><p>Zwölf Füchse — für 3 €.</p><p style='break-before: page'>Ende.</p>"
    )
    printed = other.pdf()
    other.close()
    page.goto(server.url)
    attach(page, printed=printed)
    expect(page.locator("#files li")).to_contain_text("characters")
    ask(page, "How many?")
    prompt = prompt_of(server)
    assert "[page 1]\nÜber Füchse\nZwölf Füchse — für 3 €.\n\n[page 2]\nEnde.\n```" in prompt


REFUSED = {
    "locked": (write_pdf(["Secret"], trailer=LOCKED), "locked.pdf needs a password"),
    "scanned": (write_pdf(["", ""]), "scanned.pdf has no text: its pages are pictures"),
    "damaged": (b"%PDF-1.7\0\xff", "damaged.pdf is damaged, or no PDF"),
    "table": (
        write_pdf(["Mao"], font=SONG),
        "table.pdf has no text that can be read here: its fonts need tables",
    ),
    "endless": (write_pdf(["Again"] * 501), "endless.pdf has more than 500 pages"),
    "wordy": (
        write_pdf(["\n".join(["word " * 16] * 12_600)]),
        "wordy.pdf has more than 1,000,000 characters",
    ),
}


@pytest.mark.parametrize("name", nightly_after(3, REFUSED))
def test_what_cannot_be_read_says_why(page: Page, server: HttpServer, name: str) -> None:
    body, message = REFUSED[name]
    page.goto(server.url)
    attach(page, **{name: body})
    expect(page.locator("#notice")).to_contain_text(message)
    expect(page.locator("#files li")).to_have_count(0)
    ask(page)


@pytest.mark.slow
def test_a_large_file_is_not_read(page: Page, server: HttpServer, tmp_path: Path) -> None:
    large = tmp_path / "large.pdf"
    with large.open("wb") as file:
        file.write(b"%PDF-1.7\n")
        file.truncate(20_000_001)
    page.goto(server.url)
    page.locator("#chooser").set_input_files(large)
    expect(page.locator("#notice")).to_contain_text("large.pdf is larger than 20,000,000 bytes")


@pytest.mark.slow
def test_a_file_that_is_being_read_holds_the_question_back_until_it_is_removed(
    page: Page, server: HttpServer
) -> None:
    page.goto(server.url)
    page.evaluate(
        "() => { window.Worker = class { postMessage() {} terminate() { document.title = 'ended' } } }"
    )
    attach(page, slow=write_pdf(["Once."]))
    expect(page.locator("#files li")).to_contain_text("slow.pdf, reading")
    page.get_by_label("Your message").fill("How many?")
    page.keyboard.press("Enter")
    expect(page.locator("#notice")).to_contain_text("slow.pdf is still being read")
    expect(page.get_by_label("Your message")).to_have_value("How many?")
    page.get_by_label("Remove slow.pdf").click()
    expect(page).to_have_title("ended")
    expect(page.locator("#files")).to_be_hidden()
    page.keyboard.press("Enter")
    expect(page.locator(".turn.model")).to_have_count(1)


@pytest.mark.slow
def test_a_reader_that_does_not_start_is_told(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    page.evaluate("() => { window.Worker = class { postMessage() { this.onerror() } terminate() {} } }")
    attach(page, plain=write_pdf(["Once."]))
    expect(page.locator("#notice")).to_contain_text("plain.pdf could not be read")
    expect(page.locator("#files")).to_be_hidden()


@pytest.mark.slow
def test_no_other_address_becomes_a_worker(browser: Browser, server: HttpServer) -> None:
    page = browser.new_page()  # one whose log may have errors: each refusal is one
    page.goto(server.url)
    expect(page.locator("#welcome-model")).to_contain_text("tokens of context")
    for refused in (
        "trustedTypes.createPolicy('pdf-worker', {})",
        "trustedTypes.createPolicy('another', {})",
        "new Worker('web/dom.js')",
    ):
        assert page.evaluate(f"() => {{ try {{ {refused} }} catch {{ return 'refused' }} }}") == "refused"
    page.close()


def test_the_worker_can_send_nothing(browser: Browser, server: HttpServer) -> None:
    page = browser.new_page()
    page.goto(server.url)
    expect(page.locator("#welcome-model")).to_contain_text("tokens of context")
    page.evaluate(
        "() => { const Real = Worker; window.Worker = class extends Real {"
        "  constructor(...of) { super(...of); window.reader = this } terminate() {} } }"
    )
    attach(page, plain=write_pdf(["Once."]))
    expect(page.locator("#files li")).to_contain_text("14 characters")
    (worker,) = page.workers
    assert worker.evaluate("() => fetch('/health').then(() => 'sent', () => 'refused')") == "refused"
    page.close()
