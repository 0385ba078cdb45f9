"""The page of the experts in a real browser, on a real server."""

from __future__ import annotations

import json
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Page, expect

from moeserve.messages.expert_cache import ExpertCacheCounts
from moeserve.messages.expert_disk import ExpertDiskCounts
from moeserve.messages.steps import ExpertUse
from tests.browser.conftest import KEY, Screenshot
from tests.e2e.completions import TEXT, completion
from tests.support.servers.http_harness import HttpServer, http_server
from tests.support.servers.server import Server
from tests.support.servers.waiting import within

CELL = 40  # CSS pixels: the widest, which a model with few experts gets
LEFT, TOP = 34, 6  # of the first cell
MARK = [64, 214, 196]


def counts(server: Server) -> list[list[int]]:
    counts: list[list[int]] = httpx.get(server.base_url + "/v1/experts").json()["counts"]
    return counts


def total(page: Page, name: str) -> str:
    return page.locator("#totals div", has_text=name).locator("dd").inner_text()


def point_at(page: Page, layer: int, column: int) -> str:
    page.hover("#canvas", position={"x": LEFT + (column + 0.5) * CELL, "y": TOP + (layer + 0.5) * CELL})
    return page.locator("#reading").inner_text()


def colour_at(page: Page, layer: int, column: int, *, down: float = 0.3) -> list[int]:
    """Red, green and blue; `down` is a share of the cell's height."""
    place = [LEFT + (column + 0.3) * CELL, TOP + (layer + down) * CELL]
    script = """([x, y]) => {
      const context = document.querySelector("#canvas").getContext("2d");
      return [...context.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data.slice(0, 3)];
    }"""
    colour: list[int] = page.evaluate(script, place)
    return colour


def test_the_map_shows_what_the_server_counts_while_it_counts(
    page: Page, server: Server, screenshot: Screenshot
) -> None:
    completion(server, prompt=TEXT, max_tokens=4)
    page.goto(server.base_url + "/experts")
    expect(page.locator("#layers tr").first).to_be_visible()
    before = int(total(page, "Tokens routed").replace(",", ""))
    completion(server, prompt="Once upon a time " * 20, max_tokens=400, temperature=1, seed=1)
    time.sleep(0.6)  # counts may be half a second old: the page may have asked in the middle of the answer
    now = counts(server)
    top_k = httpx.get(server.base_url + "/v1/experts").json()["experts_per_token"]
    routed = max(map(sum, now)) // top_k
    assert routed > before + 399
    # Where all have been counted: the page asks in between.
    expect(page.locator("#totals")).to_contain_text(f"{routed:,}")
    page.get_by_label("live").uncheck()
    for layer, row in enumerate(now):
        ranked = sorted(range(len(row)), key=row.__getitem__)
        share = f"{100 * row[ranked[-1]] / sum(row):.1f}%"
        expected = (
            f"Layer {layer}, expert {ranked[-1]}: {row[ranked[-1]]:,} tokens, {share} of the layer, on CPU"
        )
        assert point_at(page, layer, ranked[-1]) == expected
        assert colour_at(page, layer, ranked[-1])[0] == 255 > colour_at(page, layer, ranked[0])[0]
        hottest = 100 * sum(row[expert] for expert in ranked[-top_k:]) / sum(row)
        expect(page.locator("#layers tr").nth(layer)).to_contain_text(f"{hottest:.1f}%")
    screenshot(page, "experts")


@pytest.mark.slow
def test_the_hottest_come_first_on_demand(page: Page, server: Server) -> None:
    completion(server, prompt=TEXT, max_tokens=1)
    page.goto(server.base_url + "/experts")
    expect(page.locator("#layers tr").first).to_be_visible()
    page.get_by_label("live").uncheck()
    page.get_by_label("Order").select_option("hottest first")
    reds = [colour_at(page, 1, column)[0] for column in range(8)]
    assert reds == sorted(reds, reverse=True)
    page.get_by_label("Hottest", exact=True).fill("3")
    expect(page.locator("#layers tr").first.locator("td").last).to_have_text(re.compile(r"\d+, \d+, \d+"))
    page.get_by_label("Hottest", exact=True).fill("8")
    expect(page.locator("#layers tr").first).to_contain_text("100.0%")


@pytest.mark.slow
def test_arrow_keys_go_from_expert_to_expert(page: Page, server: Server) -> None:
    page.goto(server.base_url + "/experts")
    expect(page.locator("#layers tr").first).to_be_visible()
    page.focus("#canvas")
    for key, place in (
        ("ArrowRight", "Layer 0, expert 0:"),
        ("ArrowRight", "Layer 0, expert 1:"),
        ("ArrowDown", "Layer 1, expert 1:"),
        ("ArrowLeft", "Layer 1, expert 0:"),
        ("ArrowLeft", "Layer 1, expert 0:"),
        ("ArrowUp", "Layer 0, expert 0:"),
    ):
        page.keyboard.press(key)
        expect(page.locator("#reading")).to_contain_text(place)


def test_the_download_is_the_file_that_the_server_gives(page: Page, server: Server) -> None:
    page.goto(server.base_url + "/experts")
    expect(page.locator("#layers tr").first).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Download heat file").click()
    assert download.value.suggested_filename == "tiny-qwen3moe-q4_k_m.heat.json"
    saved = Path(download.value.path()).read_bytes()
    assert saved == httpx.get(server.base_url + "/v1/experts/heat").content
    heat: dict[str, Any] = json.loads(saved)
    assert heat["counts"] == counts(server)


@pytest.mark.slow
def test_the_key_is_asked_for(page: Page, keyed_server: Server) -> None:
    page.goto(keyed_server.base_url + "/experts")
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("Key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#layers tr").first).to_be_visible()
    expect(page.locator("#problem")).to_be_hidden()
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#totals")).to_contain_text("Tokens routed")
    expect(page.locator("#totals")).not_to_contain_text("GPU")  # there is none
    expect(page.locator("#of-gpu")).to_be_hidden()


@pytest.mark.slow
def test_experts_in_gpu_memory_are_marked(page: Page) -> None:
    """A real httpserver process; an engine of the test's says what a machine with a GPU would."""
    counts = np.array([[5, 0, 2], [1, 6, 0]], np.int64)
    on_gpu = np.array([[1, 0, 1], [0, 1, 0]], np.uint8)
    with http_server() as server:
        page.goto(server.url + "/experts")
        assert within(30, lambda: server.expert_use_asked > 0)
        server.send(ExpertUse(2, 3, 2, counts.tobytes(), on_gpu.tobytes()))
        expect(page.locator("#layers tr")).to_have_count(2)
        assert total(page, "In GPU memory") == "3 of 6"
        expect(page.locator("#of-gpu")).to_be_visible()
        assert total(page, "Served by the GPU") == "92.9%"  # 13 of 14
        underlined = [[colour_at(page, layer, e, down=0.92) == MARK for e in range(3)] for layer in range(2)]
        assert underlined == on_gpu.astype(bool).tolist()
        assert point_at(page, 0, 0) == "Layer 0, expert 0: 5 tokens, 71.4% of the layer, on GPU"
        assert point_at(page, 0, 1) == "Layer 0, expert 1: 0 tokens, 0.0% of the layer, on CPU"
        expect(page.locator("#layers tr").nth(1)).to_contain_text("85.7%")


@pytest.mark.slow
def test_experts_are_shown_by_tier(page: Page) -> None:
    """GPU, RAM and disk; what the tiers found, lately and since the start. Then a model without a GPU."""
    tokens, on_gpu, on_disk = (
        np.ones((2, 3), np.int64),
        np.array([[1, 0, 0], [0, 1, 0]], np.uint8),
        np.array([[0, 1, 0], [1, 0, 1]], np.uint8),
    )
    cache = ExpertCacheCounts(50, 50, 7, 2_000_000_000)
    with http_server() as server:
        page.goto(server.url + "/experts")
        for asked, disk in enumerate((ExpertDiskCounts(30, 20, 10**9), ExpertDiskCounts(111, 29, 3 * 10**9))):
            assert within(30, partial(asked_after, server, asked))
            server.send(
                ExpertUse(2, 3, 2, tokens.tobytes(), on_gpu.tobytes(), cache, on_disk.tobytes(), disk)
            )
            if not asked:
                expect(page.locator("#totals")).to_contain_text("60.0% of all")
        expect(page.locator("#totals")).to_contain_text("90.0% lately, 79.3% of all")
        assert total(page, "RAM has of the rest").startswith("90.0%")
        assert total(page, "Read from disk") == "3.0 GB; 2.0 GB lately"
        assert total(page, "In RAM") == "1 of 6"
        for part in ("#of-gpu", "#of-disk", "#of-ram"):
            expect(page.locator(part)).to_be_visible()
        page.get_by_label("live").uncheck()
        shown = [[point_at(page, layer, expert).split(", ")[-1] for expert in range(3)] for layer in range(2)]
        assert shown == [["on GPU", "on disk", "in RAM"], ["on disk", "on GPU", "on disk"]]
        cut = [[corner_is_cut(page, layer, expert) for expert in range(3)] for layer in range(2)]
        assert cut == on_disk.astype(bool).tolist()
        expect(page.locator("#layers tr").nth(1).locator("td").nth(5)).to_have_text("2")
        assert colour_at(page, 1, 1, down=0.92) == MARK
        before = server.expert_use_asked
        page.get_by_label("live").check()
        assert within(30, partial(asked_after, server, before))
        no_gpu = np.zeros((2, 3), np.uint8).tobytes()
        server.send(ExpertUse(2, 3, 2, tokens.tobytes(), no_gpu, None, on_disk.tobytes(), disk))
        expect(page.locator("#of-gpu")).to_be_hidden()
        expect(page.locator("#of-disk")).to_be_visible()
        assert total(page, "Found in RAM") == "79.3% of all"


def corner_is_cut(page: Page, layer: int, column: int) -> bool:
    """Whether the page shows through at the right of the cell's upper edge."""
    place = [LEFT + (column + 0.9) * CELL, TOP + (layer + 0.1) * CELL]
    script = """([x, y]) => {
      const context = document.querySelector("#canvas").getContext("2d");
      return context.getImageData(x * devicePixelRatio, y * devicePixelRatio, 1, 1).data[3] === 0;
    }"""
    cut: bool = page.evaluate(script, place)
    return cut


def asked_after(server: HttpServer, times: int) -> bool:
    return server.expert_use_asked > times


def test_what_the_expert_cache_does_is_shown_while_it_does_it(page: Page) -> None:
    """Hits since the page last asked, and of all; a page that asks for the second time has both."""
    tokens, first, then = np.ones((2, 3), np.int64), [[1, 0, 1], [0, 1, 0]], [[0, 1, 1], [0, 1, 0]]
    with http_server() as server:
        page.goto(server.url + "/experts")
        for asked, (on_gpu, cache) in enumerate(
            (
                (first, ExpertCacheCounts(50, 50, 7, 2_000_000_000)),
                (then, ExpertCacheCounts(140, 60, 9, 2_500_000_000)),
            )
        ):
            assert within(30, partial(asked_after, server, asked))
            placed = np.array(on_gpu, np.uint8).tobytes()
            server.send(ExpertUse(2, 3, 2, tokens.tobytes(), placed, cache))
            if not asked:
                expect(page.locator("#totals")).to_contain_text("50.0% of all")
        expect(page.locator("#totals")).to_contain_text("90.0% lately, 70.0% of all")
        assert total(page, "Promotions") == "9, 2.5 GB; 2 lately"
        assert point_at(page, 0, 1).endswith("on GPU")
