"""A next-token block of one stream behind layers whose residual has several: GLM-5.3-Flash's, beside what transformers
computes of the same weights, and its drafts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.worker.loading import drafting
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.kernels.engines.model_engine import distance
from tests.support.models.folder_as_gguf import write_gguf
from tests.support.models.glm5next_block import Glm5NextFolder
from tests.support.models.glm5next_model import DENSE_UP_TO
from tests.support.worker.foreseen_drafts import ANSWER, asked
from tests.support.worker.served_answers import load, lose_at, serve
from tests.worker.drafts.next_token_rows import Drafting

TOKENS = [(37 * i * i + 11 * i) % 600 for i in range(60)]
assert len(TOKENS) > DENSE_UP_TO  # so that the model chooses keys, and the block does not


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Glm5NextFolder:
    return Glm5NextFolder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def truth(folder: Glm5NextFolder) -> torch.Tensor:
    return folder.truth(TOKENS)


@pytest.fixture(params=["folder", "GGUF"], name="path")
def _path(request: pytest.FixtureRequest, folder: Glm5NextFolder, tmp_path: Path) -> Iterator[Path]:
    if request.param == "folder":
        yield folder.path
    else:
        write_gguf(folder.path, tmp_path / "tiny.gguf")
        yield tmp_path / "tiny.gguf"


def test_what_torch_computes(path: Path, truth: torch.Tensor) -> None:
    drafting = Drafting(path, TOKENS)
    logits = torch.stack([drafting.logits(row) for row in range(1, len(TOKENS))])
    kl, agrees = distance(truth, logits)
    assert kl.median() < 1e-6
    assert agrees.all()


def test_stored_rows_are_those_that_were_predicted(folder: Glm5NextFolder) -> None:
    """Bit for bit, in chunks too."""
    one_by_one, stored = Drafting(folder.path, TOKENS), Drafting(folder.path, TOKENS)
    expected = [one_by_one.logits(row) for row in range(1, len(TOKENS))]
    stored.block.store(stored.rows(1, 7))
    stored.block.store(stored.rows(7, len(TOKENS) - 1))
    assert torch.equal(stored.logits(len(TOKENS) - 1), expected[-1])


def test_a_row_has_the_same_bits_in_a_crowd(folder: Glm5NextFolder) -> None:
    """Beside rows of two more requests with other keys."""
    drafting = Drafting(folder.path, TOKENS)
    last = len(TOKENS) - 1
    drafting.block.store(drafting.rows(1, last))
    alone = drafting.logits(last)
    tables = np.ascontiguousarray(
        np.stack([np.roll(drafting.kv_slots, shift)[1:] for shift in (3, 0, 9)]), np.int32
    )
    row = drafting.rows(last, last + 1)
    places = np.array([400, row.kv_slots[0], 401], np.int32)
    tables[[0, 2], last - 1] = places[[0, 2]]
    crowd = row._replace(
        token_ids=np.array([5, row.token_ids[0], 7], np.int32),
        states=torch.stack([row.states[0] * 0.5, row.states[0], -row.states[0]]),
        positions=np.repeat(row.positions, 3),
        kv_slots=places,
    )
    drafting.block.predict(crowd, np.arange(3, dtype=np.int32), tables)
    assert torch.equal(drafting.engine.model._space.logits[1], alone)


def test_its_drafts_leave_the_text_as_it_is(folder: Glm5NextFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "least_probability", lambda _config: 0.0)
    plain = build_cpu_runner(load(folder.path))
    requests = asked(3, plain.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    mtp = load(folder.path, speculative_config='{"method": "auto", "num_speculative_tokens": 3}')
    found, report = serve(build_cpu_runner(mtp), requests, 3, lose_at(6))
    assert found == expected
    assert report.draft_tokens > ANSWER
