"""A table of n-gram embeddings whose file is written to while it is served: tokens whose rows are in RAM go on, and
requests that need other rows end with the cause, as with experts on disk."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from gguf.constants import GGMLQuantizationType as Type

from moeserve.messages.steps import StepResult
from moeserve.worker.engines.wrong_slots import SHARED
from moeserve.worker.loading.cpu.load import load_cpu_runner
from tests.gpu.driver import GREEDY, Driver, small_config
from tests.support.models.hugging_face_model import tokenizer_files
from tests.support.models.qwen4exp_model import new_model, text, write_model

SERVED, OTHER = text(8)[:20], text(9)[:20]
TOLD = "per_layer_token_embd.weight could not be read from disk: the file was changed while it was served; restart the"


def gguf_of(folder: Path) -> Path:
    return write_model(new_model(8), folder / "m.gguf", Type.Q8_0)


def folder_of(folder: Path) -> Path:
    new_model(8, split_ngram_parts=4).save_pretrained(folder / "m", max_shard_size="1MB")
    for name, content in tokenizer_files().items():
        (folder / "m" / name).write_bytes(content)
    return folder / "m"


@pytest.fixture(params=[gguf_of, folder_of], ids=["GGUF", "folder"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path: Path = request.param(tmp_path)
    return path


def driver_of(model: Path) -> Driver:
    config = small_config(model, device="cpu", threads=2, max_num_seqs=4, max_model_len=64)
    return Driver(load_cpu_runner(config, lambda *_: None))


def step(driver: Driver, **prompts: list[int]) -> StepResult:
    """Prompts in slots by name: s0, s1, ..."""
    slots = {int(name[1:]): tokens for name, tokens in prompts.items()}
    new = [driver.new(slot, tokens, GREEDY) for slot, tokens in slots.items()]
    return driver.step(new, [driver.row(slot, len(tokens), sample=True) for slot, tokens in slots.items()])


def files(model: Path) -> list[Path]:
    return sorted(model.glob("*.safetensors")) if model.is_dir() else [model]


def test_rows_that_are_written_while_served_are_not_read(model: Path) -> None:
    driver = driver_of(model)
    expected = step(driver, s0=SERVED)
    assert not expected.failed_rows
    before = {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in files(model)}
    for file, (whole, _) in before.items():
        with file.open("r+b") as opened:
            opened.write(whole[-4096:] + whole[:-4096])
    found = step(driver, s1=SERVED, s2=OTHER)
    assert found.sampled[0].token_id == expected.sampled[0].token_id
    assert list(found.failed_rows) == [1]
    assert TOLD in found.failed_rows[1]

    # Once the file is whole again, requests fail that read the KV or the state of a token whose row of the table was
    # not read; others go on.
    for file, (whole, changed_ns) in before.items():
        with file.open("r+b") as opened:
            opened.write(whole)
        os.utime(file, ns=(changed_ns, changed_ns))
    found = driver.step([], [driver.row(slot, 1, sample=True) for slot in (0, 2)])
    assert found.failed_rows == {1: SHARED}


def test_a_file_that_became_shorter_is_not_touched(model: Path) -> None:
    driver = driver_of(model)
    assert not step(driver, s0=SERVED).failed_rows
    for file in files(model):
        os.truncate(file, 4096)
    found = step(driver, s1=OTHER)
    assert TOLD in found.failed_rows[0]


def test_a_file_that_another_has_replaced_is_read_on(model: Path) -> None:
    """The old file, which is whole."""
    expected = step(driver_of(model), s0=SERVED, s1=OTHER)
    driver = driver_of(model)
    step(driver, s0=SERVED)
    for file in files(model):
        other = file.with_suffix(".other")
        other.write_bytes(bytes(file.stat().st_size))
        other.replace(file)
    found = step(driver, s1=OTHER)
    assert not found.failed_rows
    assert found.sampled[0].token_id == expected.sampled[1].token_id
