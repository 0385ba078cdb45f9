"""Before a model is served: what is wrong with its weights is said, and nothing stays of the step that found it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.torch import load_file, save_file

from moeserve.messages.sampling import SamplingParams
from moeserve.models.blocks.cpu import forms
from moeserve.models.blocks.cpu.forms import RopeTables
from moeserve.models.blocks.rope import rope_tables
from moeserve.models.errors import ModelError
from moeserve.worker.engines.cpu.engine import CpuEngine
from moeserve.worker.loading.cpu.load import load_cpu_model, load_cpu_runner, try_cpu_model
from moeserve.worker.loading.load import load_runner
from moeserve.worker.loading.self_test import check_logits
from tests.gpu.driver import Driver, small_config
from tests.support.models.hugging_face_settings import VOCAB_ROWS

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def overwrite(folder: Path, name: str, value: float, at: tuple[int, ...]) -> None:
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            tensors[name][at] = value
            save_file(tensors, file)
            return
    raise AssertionError(name)


@pytest.mark.parametrize(
    ("name", "value", "at"),
    [
        ("lm_head.weight", np.nan, (4000, 5)),
        ("model.embed_tokens.weight", np.inf, (0, 1)),
        ("model.layers.1.self_attn.v_proj.weight", np.nan, (3, 3)),
        ("model.norm.weight", -np.inf, (7,)),
    ],
)
def test_a_folder_with_weights_that_are_not_finite_is_refused(
    written: Path, tmp_path: Path, name: str, value: float, at: tuple[int, ...]
) -> None:
    folder = tmp_path / "broken-moe"
    shutil.copytree(written, folder)
    overwrite(folder, name, value, at)
    with pytest.raises(
        ModelError, match=r"broken-moe: this model's logits are not finite.*convert or download"
    ):
        load_runner(small_config(folder, device="cpu", threads=1), lambda *_: None)


def broken_gguf(tiny_model: Path, folder: Path) -> Path:
    model = folder / "broken.gguf"
    shutil.copy(tiny_model, model)
    reader = GGUFReader(model, "r+")
    (norm,) = (tensor for tensor in reader.tensors if tensor.name == "blk.0.attn_norm.weight")
    norm.data[3] = np.nan
    reader.data.flush()
    return model


@pytest.mark.parametrize("layout", ["panels", "file"])
def test_a_gguf_with_weights_that_are_not_finite_is_refused(
    tiny_model: Path, tmp_path: Path, layout: str
) -> None:
    model = broken_gguf(tiny_model, tmp_path)
    with pytest.raises(ModelError, match=r"broken.gguf: this model's logits are not finite"):
        load_runner(small_config(model, device="cpu", threads=1, weight_layout=layout), lambda *_: None)


@pytest.mark.parametrize(("layout", "is_tried_again"), [("panels", False), ("file", True)])
def test_a_later_worker_tries_only_what_may_have_changed(
    tiny_model: Path, tmp_path: Path, layout: str, is_tried_again: bool
) -> None:
    """Answers wait for it. Panels are private memory, which the first worker has tried."""
    model = broken_gguf(tiny_model, tmp_path)
    config = small_config(model, device="cpu", threads=1, weight_layout=layout)
    loaded = load_cpu_model(config, lambda *_: None)
    with pytest.raises(ModelError, match="not finite"):
        try_cpu_model(loaded, is_first=True)
    if is_tried_again:
        with pytest.raises(ModelError, match="not finite"):
            try_cpu_model(loaded, is_first=False)
    else:
        try_cpu_model(loaded, is_first=False)


def test_later_workers_do_not_compute_the_angles_again(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a context of 262,144 tokens the tables take more than half a second."""
    computed: list[object] = []

    def tables(*what: Any) -> RopeTables:
        computed.append(what)
        return rope_tables(*what)

    monkeypatch.setattr(forms, "rope_tables", tables)
    loaded = load_cpu_model(small_config(tiny_model, device="cpu", threads=1), lambda *_: None)
    for is_first in (True, False):
        try_cpu_model(loaded, is_first=is_first)
    assert len(computed) == 1


@pytest.mark.parametrize(
    "options", [{}, {"max_model_len": 4}, {"max_num_batched_tokens": 1, "max_num_seqs": 1}]
)
def test_a_sound_model_passes_in_however_little_room(tiny_model: Path, options: dict[str, int]) -> None:
    load_runner(small_config(tiny_model, device="cpu", threads=1, **options), lambda *_: None)


def test_nothing_stays_of_it(tiny_model: Path) -> None:
    config = small_config(tiny_model, device="cpu", threads=1)
    tried, fresh = (load_cpu_runner(config, lambda *_: None) for _ in range(2))
    check_logits(tried, tiny_model)
    assert tried.expert_use() == fresh.expert_use()
    assert isinstance(tried.engine, CpuEngine)
    model = tried.engine._model
    assert model.weight_bytes_read() == 0
    assert all(not kv.keys[:8].any() and not kv.values[:8].any() for kv in model._kv)
    found, expected = (Driver(runner).score(0, PROMPT, len(PROMPT)) for runner in (tried, fresh))
    assert found == expected
    assert tried.expert_use() == fresh.expert_use()


def test_a_request_whose_masks_leave_nothing_ends_alone(written: Path) -> None:
    """The worker's part of it, on the folder whose embedding is a copy of its own: a token below 0 read before it.

    The row behind the failed one is in flight already, as the router sends it."""
    driver = Driver(load_runner(small_config(written, device="cpu", threads=1), lambda *_: None))
    everything = SamplingParams(
        max_tokens=9, temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(VOCAB_ROWS))
    )
    greedy = SamplingParams(max_tokens=9, temperature=0.0)
    alone = driver.generate(1, PROMPT, 3, greedy)
    first = driver.step(
        [driver.new(0, PROMPT, everything), driver.new(1, PROMPT, greedy)],
        [driver.row(0, len(PROMPT), sample=True), driver.row(1, len(PROMPT), sample=True)],
    ).sampled
    tokens = [first[1].token_id]
    assert (first[0].error or "").startswith("no token is allowed: ")
    for _ in range(2):
        wasted, other = driver.step([], [driver.row(slot, 1, sample=True) for slot in range(2)]).sampled
        assert wasted.token_id == -1
        tokens.append(other.token_id)
    assert tokens == alone
