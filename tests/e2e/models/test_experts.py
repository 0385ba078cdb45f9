"""The heat that a server exports is what a server reads."""

from __future__ import annotations

import time
from pathlib import Path

import httpx

from moeserve.placement.heat import read_heat
from tests.conftest import TEST_DEVICE
from tests.e2e.completions import TEXT
from tests.support.servers.server import Server


def test_tokens_are_counted_by_expert(server: Server, tmp_path: Path) -> None:
    before = httpx.get(server.base_url + "/v1/experts").json()
    layers, experts, top_k = before["layers"], before["experts"], before["experts_per_token"]
    usage = server.post("/v1/completions", {"prompt": TEXT, "max_tokens": 20, "ignore_eos": True})["usage"]
    time.sleep(0.6)  # an answer may be half a second old
    text = httpx.get(server.base_url + "/v1/experts/heat").text
    (tmp_path / "heat.json").write_text(text)
    after = read_heat(tmp_path / "heat.json", layers, experts)
    computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
    computed += usage["completion_tokens"] - 1  # the last token is never an input, or once, in a wasted row
    for old, new in zip(before["counts"], after.counts, strict=True):
        assert (sum(new) - sum(old)) // top_k in (computed, computed + 1)
    on_gpu = set(range(experts)) if TEST_DEVICE == "cuda" else set()
    assert all(set(layer) <= on_gpu for layer in before["gpu_experts"])
    assert len(before["gpu_experts"]) == layers
