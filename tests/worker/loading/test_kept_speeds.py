"""Measured speeds of CPU products are kept on disk: what the next start reads, and what it measures again."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import stat
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from moeserve.config import ServerConfig
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.sources.source import ModelSource
from moeserve.quantization import QUANT_TYPES
from moeserve.worker.loading.cpu import kept_speeds
from moeserve.worker.loading.cpu.kept_speeds import MOST_AGE_S, KeptSpeeds, cache_folder
from moeserve.worker.loading.cpu.pool_start import choose_products
from tests.kernels.operations import NARROWER, needs_both

Q8_0, Q4_K = 8, 12  # ggml's numbers
SPEEDS = {Q8_0: [[1.4, 1.2], [1.8, 1.9], [1.04], [1.1], [1.6]], Q4_K: [[1.15, 1.3], [0.9, 0.8]]}


def file_of(speeds: object, **other: object) -> bytes:
    return json.dumps({"build": "b1", "measured_at": time.time(), "speeds": speeds} | other).encode()


def test_the_next_start_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "moeserve" / "products.json"
    assert KeptSpeeds(path, "b1").read() == {}
    KeptSpeeds(path, "b1").add(SPEEDS)
    assert KeptSpeeds(path, "b1").read() == SPEEDS
    assert os.listdir(path.parent) == ["products.json"]


def test_only_their_user_can_read_them(tmp_path: Path) -> None:
    path = tmp_path / "moeserve" / "products.json"
    KeptSpeeds(path, "b1").add(SPEEDS)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_speeds_of_another_build_are_replaced(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    KeptSpeeds(path, "b1").add(SPEEDS)
    other = KeptSpeeds(path, "b2")
    assert other.read() == {}
    other.add({Q4_K: [[0.8]]})
    assert KeptSpeeds(path, "b2").read() == {Q4_K: [[0.8]]}
    assert KeptSpeeds(path, "b1").read() == {}


def test_another_models_types_are_added(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    KeptSpeeds(path, "b1").add({Q8_0: SPEEDS[Q8_0]})
    second = KeptSpeeds(path, "b1")
    second.read()
    second.add({Q4_K: SPEEDS[Q4_K]})
    assert KeptSpeeds(path, "b1").read() == SPEEDS


@pytest.mark.parametrize("age", [MOST_AGE_S + 60, -60])
def test_old_ones_and_those_of_the_future_are_measured_again(tmp_path: Path, age: float) -> None:
    path = tmp_path / "products.json"
    path.write_bytes(file_of({"Q8_0": [[1.4], [1.0]]}, measured_at=time.time() - age))
    assert KeptSpeeds(path, "b1").read() == {}


def test_adding_a_type_makes_the_others_no_younger(tmp_path: Path) -> None:
    path = tmp_path / "products.json"
    path.write_bytes(file_of({"Q8_0": [[1.0]]}, measured_at=time.time() - MOST_AGE_S + 3600))
    kept = KeptSpeeds(path, "b1")
    assert kept.read() == {Q8_0: [[1.0]]}
    kept.add({Q4_K: [[1.0]]})
    assert time.time() - json.loads(path.read_bytes())["measured_at"] > MOST_AGE_S - 3700


@pytest.mark.parametrize(
    "damaged",
    [
        *(b"", b"{", b"[]", file_of({"Q8_0": "fast"}), file_of([]), file_of({}, build=7)),
        *(file_of({"Q8_0": []}), file_of({"Q8_0": [[1.0]] * 6}), file_of({"Q9_Z": [[1.0]]})),
        *(file_of({"Q8_0": [[1e300]]}), file_of({"Q8_0": [[-1.0]]}), file_of({"Q8_0": [[1.0, 0.0]]})),
        *(file_of({"Q8_0": [[1.0]]}).replace(b"1.0", b"NaN"), file_of({}, more=1), b"[" * 60000),
        *(file_of({"Q8_0": [[1.0]]}) + b" " * (1 << 17), file_of({"Q8_0": [1.0]}), file_of({"Q8_0": [[]]})),
    ],
    ids=count(),  # the bytes contain the time
)  # fmt: skip
def test_a_damaged_file_is_told_once_and_replaced(
    tmp_path: Path, damaged: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "products.json"
    path.write_bytes(damaged)
    kept = KeptSpeeds(path, "b1")
    with caplog.at_level(logging.INFO):
        assert kept.read() == {}
    assert [str(path) in record.message for record in caplog.records] == [True]
    kept.add(SPEEDS)
    assert KeptSpeeds(path, "b1").read() == SPEEDS


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "another user's"])
def test_what_is_no_file_of_this_user_is_not_read(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    real, path = tmp_path / "real.json", tmp_path / "products.json"
    KeptSpeeds(real, "b1").add(SPEEDS)
    if kind == "link":
        path.symlink_to(real)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        if os.geteuid() != 0:
            pytest.skip("only root can give a file away")
        real.rename(path)
        os.chown(path, 12345, -1)
    with caplog.at_level(logging.INFO):
        assert KeptSpeeds(path, "b1").read() == {}
    assert len(caplog.records) == 1


def test_a_folder_that_cannot_be_written_is_told_and_the_start_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    kept = KeptSpeeds(tmp_path / "file" / "products.json", "b1")
    with caplog.at_level(logging.INFO):
        kept.add(SPEEDS)
    assert "not kept for the next start" in caplog.text


def test_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/cache"}) == Path("/cache/moeserve")
    own = Path.home() / ".cache" / "moeserve"
    assert cache_folder({}) == cache_folder({"XDG_CACHE_HOME": "relative"}) == own
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    one, other, two = (
        kept_speeds.kept_speeds(CpuStream(n, isa)) for n, isa in ((1, ""), (1, "plain"), (2, ""))
    )
    for kept in (one, other, two):
        kept.add(SPEEDS)
    assert len(list((tmp_path / "moeserve").iterdir())) == 3


def test_what_a_cpu_is_known_by(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    one = "processor\t: 0\nmodel name\t: AMD EPYC\nmicrocode\t: 0x1\ncpu MHz\t\t: 2596.1\nflags\t\t: avx2\n"
    info.write_text(one + "\n" + one.replace("processor\t: 0", "processor\t: 1").replace("2596.1", "1800"))
    assert kept_speeds._cpu(info) == ["flags\t\t: avx2", "microcode\t: 0x1", "model name\t: AMD EPYC"]
    assert kept_speeds._cpu(tmp_path / "missing") == []


class Starts:
    """Starts of a server with a model of `MUCH` bytes in Q8_0, each with a pool of its own."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        tensor = SimpleNamespace(type=QUANT_TYPES[Q8_0], nbytes=1 << 40)
        self._source = cast(ModelSource, SimpleNamespace(tensors={"w": tensor}))

    def __call__(self, isa: str) -> tuple[str, str]:
        """Returns the choice in words, and the log."""
        self._caplog.clear()
        config = dataclasses.replace(ServerConfig(model="m"), isa=isa)
        with self._caplog.at_level(logging.INFO):
            choice = choose_products(CpuStream(1, "avx512_vnni"), config, self._source)
        return choice, self._caplog.text


@needs_both
def test_a_start_measures_what_no_other_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = Starts(caplog)
    start("auto")
    (path,) = (tmp_path / "moeserve").iterdir()
    first: dict[str, Any] = json.loads(path.read_bytes())
    assert list(first["speeds"]) == ["Q8_0"]
    # A speed that no measurement gives shows that the file is what decides.
    known = [[77.0, 1.0, 1.0], [0.5, 0.5, 1.0], [1.0], [1.0], [33.0]]
    path.write_bytes(json.dumps(first | {"speeds": {"Q8_0": known}}).encode())
    choice, log = start("auto")
    date = time.strftime("%Y-%m-%d", time.localtime(first["measured_at"]))
    forms = f"{NARROWER} for few tokens of Q8_0 and prefetch_to_l2 for 5 to 16 tokens of Q8_0"
    assert choice == f"{forms} by measurement, kept from {date}"
    assert f"by a measurement kept from {date}: Q8_0 with 1 token (77.00 times as fast)" in log
    assert "Q8_0 with 5 to 16 tokens (33.00 times as fast)" in log
    path.write_bytes(json.dumps(first | {"speeds": {"Q8_0": [[0.5] * 3, *[[0.5]] * 4]}}).encode())
    assert start("auto") == ("", "")


@needs_both
def test_measure_and_a_named_instruction_set_do_not_heed_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    start = Starts(caplog)
    assert start("avx512_vnni") == ("", "")
    assert list(tmp_path.iterdir()) == []
    start("measure")
    (path,) = (tmp_path / "moeserve").iterdir()
    first: dict[str, Any] = json.loads(path.read_bytes())
    known = [[77.0, 1.0, 1.0], [0.5, 0.5, 1.0], [1.0], [1.0], [1.0]]
    path.write_bytes(json.dumps(first | {"speeds": {"Q8_0": known}}).encode())
    assert start("avx512_vnni") == ("", "")
    assert "kept" not in start("measure")[0]
    assert max(map(max, json.loads(path.read_bytes())["speeds"]["Q8_0"])) < 77.0
