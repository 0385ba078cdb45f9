"""Routing traces that a server records: of one answer after another, what a debug dump says of the same tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeserve.cli.compare_dumps.reader import StepReader
from moeserve.errors import ConfigError
from moeserve.messages.sampling import SamplingParams
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement.expert_cache.routing_trace import read_trace
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.recording.dump_format import SLOTS, of_layer, step_path
from tests.conftest import TINY_MODEL
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import own_fixture

PROMPTS = [tokens[:20] for tokens in own_fixture().tokens[:2]]
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def driver_of(**options: object) -> Driver:
    return Driver(load_cpu_runner(small_config(TINY_MODEL, threads=2, **options), lambda *_: None))


def answer(driver: Driver) -> None:
    """Two prompts; six steps of both answers, then four of the second alone."""
    new = [driver.new(slot, tokens, GREEDY) for slot, tokens in enumerate(PROMPTS)]
    driver.step(new, [driver.row(slot, len(tokens), sample=True) for slot, tokens in enumerate(PROMPTS)])
    for step in range(10):
        slots = (1, 0) if step < 6 else (1,)
        driver.step([], [driver.row(slot, 1, sample=True) for slot in slots])


def test_one_answer_after_another(tmp_path: Path) -> None:
    """The first answer's six tokens, then what is left of the second's: as a dump of the same steps has them."""
    path, dump = tmp_path / "trace", tmp_path / "dump"
    answer(driver_of(record_routing_trace=str(path), record_routing_tokens=9))
    answer(driver_of(debug_dump=str(dump), debug_dump_steps=100))
    trace, shape = read_trace(path), read_shape(open_gguf(TINY_MODEL))
    assert trace.shape == (shape.num_layers, shape.num_experts, shape.top_k)
    assert len(trace.ids) == 9
    for token, ids in enumerate(trace.ids):
        step = StepReader(step_path(dump, 1 + token))
        (row,) = np.flatnonzero(step.read(SLOTS) == (0 if token < 6 else 1))
        for layer in range(shape.num_layers):
            assert ids[layer].tolist() == step.read(of_layer(layer, "expert_ids"))[row].tolist()


def test_what_was_seen_before_the_end_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeserve.worker.recording.routing_recorder.SAVED_EVERY", 4)
    answer(driver_of(record_routing_trace=str(tmp_path / "trace")))
    assert len(read_trace(tmp_path / "trace").ids) == 8


def test_steps_are_as_before_when_it_is_complete(tmp_path: Path) -> None:
    driver = driver_of(record_routing_trace=str(tmp_path / "trace"), record_routing_tokens=3)
    answer(driver)
    written = (tmp_path / "trace").read_bytes()
    answer(driver)
    assert (tmp_path / "trace").read_bytes() == written
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace"]


def test_a_disk_that_refuses_ends_the_trace_and_not_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    driver = driver_of(record_routing_trace=str(folder / "trace"), record_routing_tokens=3)
    folder.rmdir()
    answer(driver)
    assert "the routing trace ends after 3 tokens" in caplog.text


def test_files_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "there").touch()
    for options, message in (
        ({"record_routing_trace": str(tmp_path / "there")}, "is there already; name a new file"),
        ({"record_routing_trace": str(tmp_path / "no/file")}, "is in no folder that can be written to"),
        ({"record_routing_tokens": 5}, "has no effect alone; name a file"),
        (
            {"record_routing_trace": str(tmp_path / "a"), "debug_dump": str(tmp_path / "b")},
            "--debug-dump and --record-routing-trace cannot be used together; leave one of them out",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            driver_of(**options)
