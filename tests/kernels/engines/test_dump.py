"""Dumps of the real engines on the small model: they say what they mean, and a comparison names what was changed."""

from __future__ import annotations

import json
import re
import resource
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moeserve.cli.compare_dumps.compare import Result, TensorPlace, Tolerances, compare
from moeserve.cli.compare_dumps.reader import Dump, DumpError
from moeserve.cli.main import main
from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.messages.sampling import SamplingParams
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.recording.dump_format import of_layer, step_path
from tests.conftest import TINY_MODEL
from tests.gpu.driver import Driver, small_config
from tests.kernels.engines.model_engine import hugging_face_model, own_fixture
from tests.support.measuring.hugging_face_dump import texts_of, write_dump

PROMPTS = [tokens[:40] for tokens in own_fixture().tokens[:3]]
EXACT = Tolerances(0.0, 0.0)
DEFAULT = Tolerances(0.1, 3.0)
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)


def config_of(folder: Path, steps: int = 100, **options: object) -> ServerConfig:
    return small_config(TINY_MODEL, threads=2, debug_dump=str(folder), debug_dump_steps=steps, **options)


def driver_of(folder: Path, steps: int = 100, **options: object) -> Driver:
    return Driver(load_cpu_runner(config_of(folder, steps, **options), lambda *_: None))


def send(driver: Driver, order: list[int], chunk: int = 512, answers: int = 3) -> None:
    """The prompts in this order, each in chunks, then the first tokens of its answer."""
    for slot in order:
        tokens = PROMPTS[slot]
        new = [driver.new(slot, tokens, GREEDY)]
        for first in range(0, len(tokens), chunk):
            count = min(chunk, len(tokens) - first)
            driver.step(new, [driver.row(slot, count, sample=first + count == len(tokens))])
            new = []
        for _ in range(answers - 1):
            driver.step([], [driver.row(slot, 1, sample=True)])


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three prompts and the first tokens of their answers."""
    folder = tmp_path_factory.mktemp("dumps") / "ours"
    send(driver_of(folder), [0, 1, 2])
    return folder


def compared(a: Path, b: Path, tolerances: Tolerances = DEFAULT) -> Result:
    return compare(Dump(a), Dump(b), tolerances)


def changed(dumped: Path, to: Path, step: int, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of the dump with one step changed."""
    shutil.copytree(dumped, to)
    tensors = load_file(step_path(to, step))
    change(tensors)
    save_file(tensors, step_path(to, step))
    return to


# ---------------------------------------------------------------- what a dump holds


def test_the_tensors_are_what_hugging_face_computes(dumped: Path, tmp_path: Path) -> None:
    file = open_gguf(TINY_MODEL)
    model = hugging_face_model(file, read_shape(file))
    texts = texts_of(Dump(dumped))
    assert sorted(text[:-2] for text in texts) == sorted(PROMPTS)
    write_dump(model, texts, tmp_path / "theirs", "Hugging Face")
    result = compared(dumped, tmp_path / "theirs")
    assert result.first is None
    assert len(result.pairs) == sum(map(len, PROMPTS)) + 6
    # All was compared, and what is not past a near tie is as near as int8 activations allow.
    assert len(result.cells) == 2 + 6 * 3
    assert max(cell.worst for cell in result.cells.values()) < 0.1
    assert min(cell.rows - cell.tied for p, cell in result.cells.items() if p.layer == 0) > 80


def test_the_files_are_for_their_owner_and_the_dump_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    driver = driver_of(tmp_path / "dump", steps=2)
    assert not any((tmp_path / "dump").iterdir()), "nothing is dumped before the first step"
    send(driver, [0])
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names == ["dump.json", "step-00000.safetensors", "step-00001.safetensors"]
    assert stat.S_IMODE((tmp_path / "dump").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "dump").iterdir()} == {0o600}
    about = json.loads((tmp_path / "dump/dump.json").read_text())
    assert about["model"] == str(TINY_MODEL)
    assert about["engine"] == driver.runner.ready().device
    assert "the debug dump is complete: 2 steps" in caplog.text


def test_dumping_changes_nothing_that_is_computed(tmp_path: Path) -> None:
    plain = Driver(load_cpu_runner(small_config(TINY_MODEL, threads=2), lambda *_: None))
    assert driver_of(tmp_path / "dump").score(0, PROMPTS[0], 512) == plain.score(0, PROMPTS[0], 512)


def test_a_folder_that_cannot_be_used_is_refused(dumped: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").touch()
    for folder, message in (
        (dumped, "holds a dump already; name a new folder"),
        (tmp_path / "full", "is not empty; name a new folder"),
        (tmp_path / "full/file", "cannot be used: "),
    ):
        with pytest.raises(ConfigError, match=f"--debug-dump: .*{message}"):
            driver_of(folder)


def test_steps_without_a_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match="--debug-dump-steps has no effect alone"):
        load_cpu_runner(small_config(TINY_MODEL, debug_dump_steps=3), lambda *_: None)


def test_a_disk_that_refuses_ends_the_dump_and_not_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    driver = driver_of(tmp_path / "dump")
    driver.generate(0, PROMPTS[0][:3], 1, GREEDY)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # bytes of a file
    try:
        answer = driver.generate(1, PROMPTS[0], 3, GREEDY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(answer) == 3
    assert caplog.text.count("the debug dump ends after 1 steps: [Errno 27] File too large") == 1
    assert len(Dump(tmp_path / "dump").steps) == 1
    assert not list((tmp_path / "dump").glob("*.partial"))


def test_a_step_that_does_not_fit_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver = driver_of(tmp_path / "dump")
    driver.generate(0, PROMPTS[0][:3], 1, GREEDY)
    free = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
    assert len(driver.generate(1, PROMPTS[0], 3, GREEDY)) == 3
    assert re.search(
        r"the debug dump ends after 1 steps: the next takes 0\.\d\d MB, and 0.10 MB are free", caplog.text
    )
    assert len(Dump(tmp_path / "dump").steps) == 1


# ---------------------------------------------------------------- the comparison


def test_other_batches_give_the_same_bits(dumped: Path, tmp_path: Path) -> None:
    """In chunks and in another order of requests: rows are matched by what came before them."""
    send(driver_of(tmp_path / "chunks"), [2, 0, 1], chunk=7)
    result = compared(dumped, tmp_path / "chunks", EXACT)
    assert result.first is None
    assert len(result.pairs) == len(Dump(dumped).rows.context)
    assert result.num_logits == result.same_top == result.same_sampled == 9


def test_a_request_that_one_dump_lacks_is_left_out(dumped: Path, tmp_path: Path) -> None:
    send(driver_of(tmp_path / "two"), [0, 2])
    result = compared(dumped, tmp_path / "two", EXACT)
    assert result.first is None
    assert len(result.pairs.only_a) == len(PROMPTS[1]) + 2
    assert len(result.pairs.only_b) == 0


@pytest.mark.parametrize(
    ("layer", "tensor"),
    [
        (None, "embedding"),
        (1, "after_attention"),
        (0, "router_logits"),
        (2, "expert_weights"),
        (1, "expert_output"),
        (None, "logits"),
    ],
)
def test_what_was_changed_is_named(dumped: Path, tmp_path: Path, layer: int | None, tensor: str) -> None:
    """A row of step 3, the second prompt's, in a tensor, and the same of a later step."""
    place = TensorPlace(layer, tensor)
    row = 0 if tensor == "logits" else 5

    def change(tensors: dict[str, Any]) -> None:
        tensors[place.name][row] *= 1.5

    other = changed(dumped, tmp_path / "first", 3, change)
    first = compared(dumped, changed(other, tmp_path / "other", 6, change)).first
    assert first is not None
    assert first.place == place
    assert first.relative == pytest.approx(1 / 3, rel=1e-3)
    rows = Dump(dumped).rows
    assert rows.step[first.pair] == 3
    assert rows.row[first.pair] == (len(PROMPTS[1]) - 1 if tensor == "logits" else row)
    assert main(["compare-dumps", str(dumped), str(tmp_path / "other")]) == 1


def test_a_wrong_expert_is_named(dumped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose layer 1 has one expert's down matrix in another's place."""
    file, name = open_gguf(TINY_MODEL), "blk.1.ffn_down_exps.weight"
    rows = file.data(name)
    broken = rows.copy().reshape(8, -1)
    broken[3] = broken[4]
    right = type(file).data
    monkeypatch.setattr(
        type(file), "data", lambda f, asked: broken.reshape(rows.shape) if asked == name else right(f, asked)
    )
    send(driver_of(tmp_path / "broken"), [0, 1, 2])
    result = compared(dumped, tmp_path / "broken")
    assert result.first is not None
    assert result.first.place == TensorPlace(1, "expert_output")
    ids = Dump(dumped).rows_of(of_layer(1, "expert_ids"), result.pairs.a)
    uses = (ids == 3).any(axis=1)
    assert result.first.pair == np.flatnonzero(uses)[0]
    assert result.cells[TensorPlace(1, "expert_output")].differ == uses.sum()


def test_a_choice_that_the_logits_do_not_explain_is_a_difference(dumped: Path, tmp_path: Path) -> None:
    def swap(tensors: dict[str, Any]) -> None:
        ids, logits = tensors[of_layer(1, "expert_ids")], tensors[of_layer(1, "router_logits")]
        ids[4, 0] = logits[4].argmin()

    result = compared(dumped, changed(dumped, tmp_path / "other", 0, swap))
    assert result.first is not None
    assert result.first.place == TensorPlace(1, "expert_ids")
    assert result.first.experts is not None
    assert result.cells[TensorPlace(1, "expert_ids")].ties == 0


def test_a_near_tie_is_none(dumped: Path, tmp_path: Path) -> None:
    """The second and the third expert of a row change places, by their logits: what comes behind is allowed more."""

    def tie(tensors: dict[str, Any]) -> None:
        ids, logits = tensors[of_layer(0, "expert_ids")], tensors[of_layer(0, "router_logits")]
        order = logits[4].argsort()[::-1]
        middle = (logits[4, order[1]] + logits[4, order[2]]) / 2
        logits[4, order[1]], logits[4, order[2]] = middle - 1e-6, middle + 1e-6
        ids[4] = order[[0, 2]]
        tensors[of_layer(1, "after_attention")][6] *= 1.4  # behind it, in the same text

    result = compared(dumped, changed(dumped, tmp_path / "other", 0, tie), Tolerances(0.25, 3.0))
    assert result.first is None
    cell = result.cells[TensorPlace(0, "expert_ids")]
    assert (cell.other, cell.ties, cell.differ) == (1, 1, 0)
    behind = result.cells[TensorPlace(1, "after_attention")]
    assert behind.tied == len(PROMPTS[0]) - 4 + 2
    assert behind.worst == 0
    assert behind.worst_tied == pytest.approx(0.4 / 1.4, rel=1e-3)


def test_what_is_not_finite_is_told(dumped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def break_it(tensors: dict[str, Any]) -> None:
        tensors[of_layer(2, "expert_output")][3, 17] = np.nan

    broken = changed(dumped, tmp_path / "nan", 0, break_it)
    assert main(["compare-dumps", str(dumped), str(broken)]) == 1
    told = capsys.readouterr().out
    assert "The first difference: layer 2, expert_output" in told
    assert "relative distance inf" in told
    assert "B has values that are not finite, first in layer 2, expert_output: step 0, row 3" in told
    assert main(["compare-dumps", str(broken), str(broken)]) == 0
    assert "A has values that are not finite" in capsys.readouterr().out


def test_the_command_tells_and_exits_with_0(dumped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare-dumps", str(dumped), str(dumped), "--tolerance", "0"]) == 0
    told = capsys.readouterr().out
    assert "No difference beyond the tolerance of 0." in told
    assert "most likely token: the same in 9 of 9 rows" in told


def test_what_cannot_be_compared_exits_with_2(
    dumped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    damaged = shutil.copytree(dumped, tmp_path / "damaged")
    step_path(damaged, 1).write_bytes(b"\xff" * 100)
    cut = changed(dumped, tmp_path / "cut", 0, lambda tensors: tensors.pop("contexts"))
    narrow = changed(
        dumped,
        tmp_path / "narrow",
        0,
        lambda t: t.update(embedding=np.ascontiguousarray(t["embedding"][:, 1:])),
    )
    alien = changed(dumped, tmp_path / "alien", 0, lambda t: None)
    for path in alien.glob("step-0000[1-9]*"):
        path.unlink()
    tensors = load_file(step_path(alien, 0))
    tensors["contexts"] += 1
    save_file(tensors, step_path(alien, 0))
    for folder, message in (
        (tmp_path / "nowhere", "holds no dump.json; is it a dump?"),
        (tmp_path / "empty", "holds no dump.json"),
        (damaged, "step-00001.safetensors: cannot be read"),
        (cut, "has no contexts"),
        (narrow, "these are two models"),
        (alien, "the two dumps have no rows of the same prompt in common"),
    ):
        with pytest.raises(SystemExit) as end:
            main(["compare-dumps", str(dumped), str(folder)])
        assert end.value.code == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_a_dump_of_another_format_is_refused(dumped: Path, tmp_path: Path) -> None:
    later = shutil.copytree(dumped, tmp_path / "later")
    (later / "dump.json").write_text('{"format": 2}')
    with pytest.raises(DumpError, match="has format 2; this version reads 1"):
        Dump(later)
