"""The file of routing traces: what is written is read, and nothing else is."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeserve.cli.bench.trace import main as write
from moeserve.errors import ConfigError
from moeserve.placement.expert_cache.generate import LOCAL, UNIFORM, generate
from moeserve.placement.expert_cache.routing_trace import RoutingTrace, read_trace, write_trace
from tests.conftest import TINY_MODEL

GOOD: dict[str, Any] = {
    "format": "moeserve-routing-trace",
    "version": 1,
    "source": "a test",
    "tokens": 2,
    "layers": 2,
    "experts": 5,
    "experts_per_token": 2,
}
IDS = np.array([[[0, 1], [3, 4]], [[4, 0], [2, 1]]], "<u2")


def file_of(path: Path, header: object, ids: bytes) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + ids)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    trace = RoutingTrace("a test", 5, IDS)
    write_trace(tmp_path / "trace", trace)
    assert (tmp_path / "trace").read_bytes() == file_of(
        tmp_path / "b", GOOD, IDS.tobytes()
    ).read_bytes().replace(b": ", b":").replace(b", ", b",").replace(
        struct.pack("<Q", len(json.dumps(GOOD))), (tmp_path / "trace").read_bytes()[:8]
    )
    found = read_trace(tmp_path / "trace")
    assert (found.source, found.shape) == ("a test", (2, 5, 2))
    assert np.array_equal(found.ids, IDS)
    assert np.flatnonzero(found.used(1)[0]).tolist() == [0, 4]


@pytest.mark.parametrize(
    ("change", "ids", "said"),
    [
        ({"version": 2}, IDS, "version"),
        ({"format": "x"}, IDS, "format"),
        ({"tokens": 3}, IDS, "24 bytes"),
        ({"tokens": 1}, IDS, "8 bytes"),
        ({"tokens": 1 << 24, "layers": 1024}, IDS, "are allowed"),
        ({"experts": 4}, IDS, "expert 4 of 4"),
        ({"extra": 1}, IDS, "extra"),
        ({}, np.zeros_like(IDS), "twice"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, change: dict[str, Any], ids: Any, said: str) -> None:
    path = file_of(tmp_path / "bad", GOOD | change, ids.tobytes())
    with pytest.raises(ConfigError, match=said) as raised:
        read_trace(path)
    assert str(path) in str(raised.value)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=200), st.integers(0, 200))
def test_damaged_files_are_errors(tmp_path: Path, noise: bytes, at: int) -> None:
    good = file_of(tmp_path / "good", GOOD, IDS.tobytes()).read_bytes()
    path = tmp_path / "damaged"
    path.write_bytes(good[:at] + noise)
    try:
        trace = read_trace(path)
    except ConfigError:
        return
    assert trace.ids.max() < trace.experts


def reuse(trace: RoutingTrace, capacity: int) -> float:
    """The share of a layer's choices that an LRU cache of `capacity` experts has."""
    stack, hits = list(range(trace.experts)), 0
    for of_token in trace.ids[:, 0].astype(int):
        for e in of_token[::-1]:  # the last choice is on top of the stack, so it is first
            depth = stack.index(e)
            hits += depth < capacity
            stack.insert(0, stack.pop(depth))
    return hits / trace.ids[:, 0].size


def test_generated_traces_have_the_published_reuse() -> None:
    trace = generate(LOCAL, "local", tokens=1500, layers=2, experts=128, top_k=8)
    published = {8: 0.366, 24: 0.741, 49: 0.894, 81: 0.962}
    for capacity, hits in published.items():
        assert abs(reuse(trace, capacity) - hits) < 0.02
    used = np.stack([trace.used(token)[0] for token in range(1500)])
    repeats = (used[1:] & used[:-1]).sum() / used[1:].sum()
    assert abs(repeats - 0.45) < 0.06
    within_eight = np.logical_or.reduce([used[8 - back : -back] for back in range(1, 9)])
    assert abs((used[8:] & within_eight).sum() / used[8:].sum() - 0.80) < 0.06


def test_uniform_traces_prefer_nothing() -> None:
    trace = generate(UNIFORM, "uniform", tokens=2000, layers=1, experts=32, top_k=4)
    # A token's j-th choice is none of the j before it.
    expected = np.mean([(8 - j) / (32 - j) for j in range(4)])
    assert abs(reuse(trace, 8) - expected) < 0.02
    counts = np.bincount(trace.ids.ravel(), minlength=32)
    assert counts.min() > 0.7 * counts.mean()


def test_a_topic_ends() -> None:
    trace = generate(LOCAL, "local", tokens=400, layers=8, experts=128, top_k=8, topic_tokens=200)
    used = np.stack([trace.used(token) for token in range(400)])
    assert (used[200] & used[199]).sum() / used[200].sum() < 0.25
    assert (used[199] & used[198]).sum() / used[199].sum() > 0.35


def test_the_command_writes_a_trace_of_the_models_shape(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    assert (
        write(["--model", str(TINY_MODEL), "--output", str(path), "--tokens", "10", "--preset", "uniform"])
        == 0
    )
    assert read_trace(path).shape == (3, 8, 2)
    assert len(read_trace(path).ids) == 10
    with pytest.raises(SystemExit):
        write(["--model", str(tmp_path / "none.gguf"), "--output", str(path)])


@pytest.mark.parametrize("experts", [2, 3, 4, 6, 8, 16, 60])
def test_few_experts_have_a_locality_too(experts: int) -> None:
    """Where several of the published caches would hold as many of them."""
    trace = generate(LOCAL, "", tokens=200, layers=2, experts=experts, top_k=2)
    assert trace.shape == (2, experts, 2)
    again = (trace.ids[1:, :, :, None] == trace.ids[:-1, :, None, :]).any(axis=3).mean()
    assert again > 2 / experts - 0.05  # as often as by chance, or more
