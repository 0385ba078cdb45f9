"""Pictures and videos that go with a question: chosen, dropped or pasted, kept with the conversation, sent with each
turn."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import FilePayload, Page, expect

from tests.browser.conftest import Screenshot, ask
from tests.support.pictures.visual_server import VisualServer, seeing_server
from tests.support.servers.http_harness import HttpServer, http_server, say

GIVE = """([type, name, mime, base64]) => {
  const data = new DataTransfer();
  data.items.add(new File([Uint8Array.from(atob(base64), (c) => c.charCodeAt(0))], name, { type: mime }));
  for (const [kind, text] of Object.entries(type === "cells" ? { "text/plain": "1", "text/html": "<b>1</b>" } : {}))
    data.setData(kind, text);
  const event = type === "drop" ? new DragEvent("drop", { dataTransfer: data, bubbles: true })
    : new ClipboardEvent("paste", { clipboardData: data, bubbles: true });
  document.getElementById("words").dispatchEvent(event);
}"""

DROP_LONG = """() => {
  const data = new DataTransfer();
  data.items.add(new File([new Uint8Array(14_000_001)], "long.mov", { type: "video/quicktime" }));
  document.getElementById("words").dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true }));
}"""


@pytest.fixture(scope="module")
def world() -> Iterator[tuple[HttpServer, VisualServer]]:
    with seeing_server() as (server, visual):
        server.answer = say("a cat")
        yield server, visual


def file_of(kind: str, width: int = 40, height: int = 30, colour: str = "teal") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(file, kind)
    return file.getvalue()


def opened(page: Page, server: HttpServer) -> None:
    page.goto(server.url)
    expect(page.get_by_label("Attach pictures")).to_be_visible()  # the model is known


def give(page: Page, how: str, name: str, data: bytes, mime: str = "image/png") -> None:
    page.evaluate(GIVE, [how, name, mime, base64.b64encode(data).decode()])


def test_pictures_are_shown_sent_and_kept(
    page: Page, world: tuple[HttpServer, VisualServer], screenshot: Screenshot
) -> None:
    server, visual = world
    bodies: list[Any] = []
    page.on("request", lambda one: bodies.append(one.post_data_json) if one.method == "POST" else None)
    opened(page, server)
    png, jpeg, webp = file_of("PNG"), file_of("JPEG", 90, 20), file_of("WEBP", 32, 32)
    page.locator("#chooser").set_input_files(FilePayload(name="a.png", mimeType="image/png", buffer=png))
    give(page, "drop", "b.jpg", jpeg, "image/jpeg")
    give(page, "paste", "c.webp", webp, "image/webp")
    give(page, "cells", "d.png", png)  # a spreadsheet's: the text is meant
    files = page.locator("#files li")
    expect(files).to_have_text(["a.png, 40 × 30✕", "b.jpg, 90 × 20✕", "c.webp, 32 × 32✕"])
    page.get_by_label("Remove b.jpg").click()
    screenshot(page, "pictures-attached")
    ask(page, "What is this?")
    assert [picture.data for picture in visual.pictures[-2:]] == [png, webp]
    kinds = [part["type"] for part in bodies[-1]["messages"][-1]["content"]]
    assert kinds == ["image_url", "image_url", "text"]

    page.reload()
    expect(page.get_by_label("Attach pictures")).to_be_visible()
    thumbnails = page.locator(".thumbnail img")
    expect(thumbnails).to_have_count(2)
    expect(page.locator(".thumbnail img").first).to_have_js_property("naturalWidth", 40)
    screenshot(page, "pictures-sent")
    page.get_by_label("Enlarge c.webp").click()
    expect(page.locator("#picture img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#picture")).to_be_hidden()
    ask(page, "And now?")
    assert [picture.data for picture in visual.pictures[-2:]] == [png, webp]

    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    (exported,) = json.loads(download.value.path().read_text())
    assert f"data:image/png;base64,{base64.b64encode(png).decode()}" in exported["pictures"].values()
    page.get_by_label("Actions for").click()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export “").click()
    assert "![a.png](data:image/png;base64," in download.value.path().read_text()
    page.get_by_label("Actions for").click()  # what is chosen closes the menu
    page.get_by_role("button", name="Delete “").click()
    expect(thumbnails).to_have_count(0)
    page.get_by_role("button", name="Undo").click()
    page.locator("#chat-list .open").click()
    expect(thumbnails).to_have_count(2)
    expect(page.locator(".thumbnail img").first).to_have_js_property("naturalWidth", 40)


def test_a_picture_that_the_server_would_not_read_is_drawn_again(
    page: Page, world: tuple[HttpServer, VisualServer]
) -> None:
    server, visual = world
    opened(page, server)
    give(page, "paste", "a.bmp", file_of("BMP"), "image/bmp")
    expect(page.locator("#files li")).to_contain_text("a.bmp, 40 × 30")
    give(page, "paste", "b.heic", b"no picture", "image/heic")
    expect(page.locator("#notice")).to_contain_text("b.heic is no picture that this browser can read")
    noise = io.BytesIO()
    Image.effect_noise((2400, 1900), 80).save(noise, "PNG")
    give(page, "paste", "c.png", noise.getvalue())
    expect(page.locator("#files li").nth(1)).to_contain_text("c.png, 2400 × 1900")
    ask(page)
    drawn, small = (Image.open(io.BytesIO(picture.data)) for picture in visual.pictures[-2:])
    assert (drawn.format, drawn.size, drawn.convert("RGB").getpixel((5, 5))) == (
        "PNG",
        (40, 30),
        (0, 128, 128),
    )
    assert small.format == "JPEG"
    assert small.width * small.height <= 2048 * 2048
    assert len(visual.pictures[-1].data) < noise.getbuffer().nbytes


def test_videos_are_sent_and_kept_as_they_are(page: Page, world: tuple[HttpServer, VisualServer]) -> None:
    server, visual = world
    bodies: list[Any] = []
    page.on("request", lambda one: bodies.append(one.post_data_json) if one.method == "POST" else None)
    opened(page, server)
    page.locator("#chooser").set_input_files(
        FilePayload(name="street.mp4", mimeType="video/mp4", buffer=b"a video")
    )
    page.evaluate(DROP_LONG)
    expect(page.locator("#notice")).to_contain_text("long.mov is larger than 14,000,000 bytes")
    expect(page.locator("#files li")).to_have_text(["street.mp4, 7 bytes✕"])
    ask(page, "What happens?")
    page.reload()
    expect(page.get_by_label("Attach pictures, videos")).to_be_visible()
    expect(page.locator(".file")).to_have_text(["street.mp4, 7 bytes"])
    ask(page, "And then?")
    for body, picture in zip(bodies[-2:], visual.pictures[-2:], strict=True):
        assert body["messages"][0]["content"][0]["type"] == "video_url"
        assert picture.video is not None
        assert picture.data == b"a video"
    with page.expect_download() as download:
        page.get_by_role("button", name="Export all").click()
    exported = download.value.path()
    page.get_by_label("Actions for").first.click()
    page.get_by_role("button", name="Delete “").first.click()
    expect(page.locator(".file")).to_have_count(0)
    page.locator("#import-chooser").set_input_files(exported)
    page.locator("#chat-list .open").first.click()
    expect(page.locator(".file")).to_have_text(["street.mp4, 7 bytes"])


def test_a_model_without_a_tower_takes_none(page: Page) -> None:
    with http_server() as server:
        page.goto(server.url)
        expect(page.locator("#welcome-model")).to_contain_text("tokens of context")
        expect(page.get_by_label("Attach text or PDF files")).to_be_visible()
        give(page, "paste", "a.png", file_of("PNG"))
        expect(page.locator("#notice")).to_contain_text("a.png is a picture, and this model reads text only")
        give(page, "paste", "a.webm", b"a video", "video/webm")
        expect(page.locator("#notice")).to_contain_text("a.webm is a video, and this model sees none")
        expect(page.locator("#files li")).to_have_count(0)
