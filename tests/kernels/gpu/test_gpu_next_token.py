"""A model's own next-token block on a GPU: its logits beside Hugging Face's truth, and its chains beside the CPU's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.next_token.op import SampledStep
from moeserve.kv.cache import KvCache
from moeserve.kv.layout import KvLayout
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.drafting_block import GpuDraftingBlock
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.models.gpu_features import gpu_shape
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.next_token import with_next_token_block
from moeserve.models.open import open_model
from moeserve.models.registry import read_checked_shape
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.next_token_chain import ChainStart, NextTokenChain
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import StepLayout
from tests.gpu.driver import small_config
from tests.kernels.engines.model_engine import distance
from tests.support.models.next_token_folder import NextTokenFolder
from tests.support.worker.foreseen_drafts import asked, whole_texts
from tests.support.worker.gpu_clock import GpuClock
from tests.support.worker.planted_drafts import Planted, always_draft
from tests.support.worker.served_answers import serve
from tests.worker.drafts.next_token_rows import Drafting, model_of

LENGTH, REQUESTS, DEPTHS = 16, 4, 2
DEV = torch.device(DEVICE)
NO_STEP = SampledStep(*torch.zeros(3, 1, dtype=torch.int32, device=DEV))


class Trunk:
    """A model on a GPU, driven by hand: a text in request slot 0."""

    def __init__(self, path: Path) -> None:
        source = open_model(path)
        shape = with_next_token_block(gpu_shape(read_checked_shape(source), LENGTH), source)
        ids = [range(layer.num_experts) for layer in shape.layers]
        weights = GpuLoader(source, shape, DEV, lambda *_: None).load(ids)
        layers = range(len(shape.loaded_layers))
        kv = KvCache(KvLayout(shape), LENGTH, layers, DEV, zeroed=True).layers
        self.tables = SlotTables.empty(REQUESTS + 1, LENGTH, DEV, has_windows=False)
        self.decoder = GpuDecoder(
            shape,
            weights,
            kv,
            self.tables.slots,
            REQUESTS,
            LENGTH,
            slots_ahead=self.tables.ahead,
            max_drafts=DEPTHS,
        )
        assert self.decoder.next_token is not None
        self.block: GpuDraftingBlock = self.decoder.next_token
        self.chain = NextTokenChain(self.block, DEV, REQUESTS, lambda: NO_STEP)
        self.slots = np.arange(LENGTH, dtype=np.int32)[::-1].copy()  # any order

    def read(self, tokens: list[int], chunk: int = REQUESTS) -> torch.Tensor:
        """Computes the text. Returns its hidden states [tokens, hidden]."""
        states = []
        for first in range(0, len(tokens), chunk):
            part = np.arange(first, min(first + chunk, len(tokens)), dtype=np.int32)
            n, size = len(part), 1 << (len(part) - 1).bit_length()
            columns = np.zeros((4, size), np.int32)
            columns[:, :n] = np.array(tokens, np.int32)[part], part, self.slots[part], part * 0
            columns[2, n:], columns[3, n:] = -1, REQUESTS
            ids, positions, kv_slots, requests = ints(columns)
            batch = GpuBatch(counter(n), ids, positions, kv_slots, requests, size, None)
            self.decoder.begin(batch)
            self.decoder.forward(batch)
            self.decoder.keep_up(batch)
            states.append(self.block._states[:n].clone())
        return torch.cat(states)

    def logits(self, tokens: list[int], states: torch.Tensor, rows: range) -> torch.Tensor:
        """The block's logits of these rows, each as a request of its own over the same keys."""
        requests = np.arange(len(rows), dtype=np.int32)
        self.tables.slots[: len(rows), : len(tokens)] = ints(self.slots[: len(tokens)])
        self.block._kept.states[: len(rows)] = states[rows.start - 1 : rows.stop - 1]
        of_rows = np.array(rows, np.int32)
        start = ChainStart(
            np.array(tokens, np.int32)[of_rows], of_rows - 1, requests, np.ones(len(rows), np.int32),
            self.slots[of_rows][None],
        )  # fmt: skip
        drafts, probabilities = self.chain.draft(start)
        logits = self.block.logits(1 << (len(rows) - 1).bit_length())[: len(rows)].cpu().clone()
        assert drafts[0].tolist() == logits.argmax(dim=1).tolist()
        assert probabilities[0] == pytest.approx(logits.softmax(dim=1).max(dim=1).values.numpy(), rel=1e-4)
        return logits


pytestmark = pytest.mark.slow  # minutes in the interpreter


@pytest.mark.parametrize("name", ["glm4moe", "glmdsa"])
def test_logits_and_chains(name: str, wide_fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where keys and values are stored a few rows at a time; and a request whose text is cached up to a page."""
    path = model_of(name, wide_fixtures)
    golden = json.loads((wide_fixtures / "next" / f"{path.stem}.golden.json").read_text())
    truth = np.load(wide_fixtures / "next" / f"{path.stem}.truth.npz", allow_pickle=False)["mtp_case0"]
    monkeypatch.setattr("moeserve.models.blocks.gpu.drafting_block.NEXT_TOKEN_ROWS", REQUESTS)
    trunk, tokens = Trunk(path), golden["cases"][0]["tokens"][:5]
    states = trunk.read(tokens, 3)
    # the last token's row would follow this state, as a step keeps it
    assert torch.equal(trunk.block._kept.states[0], states[4])
    assert trunk.block._kept.position[0] == 5
    found = trunk.logits(tokens, states, range(1, 5))
    kl, same = distance(torch.from_numpy(truth[:4].astype(np.float64)), found)
    assert kl.median() <= 2e-5
    assert same.double().mean() >= 0.75
    trunk.block._kept.states[0] = states[3]
    one = np.zeros(1, np.int32)
    planned = trunk.slots[4 : 4 + DEPTHS, None]
    start = ChainStart(np.array(tokens[4:], np.int32), one + 3, one, one + DEPTHS, planned)
    drafts, _ = trunk.chain.draft(start)
    assert drafts[:, 0].tolist() == on_the_cpu(path, tokens)


def test_behind_a_picture(tmp_path: Path) -> None:
    """Stored and drafted rows have the positions of the tokens before them, three each in a picture."""
    shape = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4}
    path = NextTokenFolder(tmp_path, "qwen3_5_moe_text", **shape).path
    text = [5, 6, 1, 1, 1, 1, 7, 8]
    rotary = np.tile(
        np.array([0, 1, 2, 2, 2, 2, 4, 5, 6], np.int32), (3, 1)
    )  # a picture of 2 x 2 tokens from 2 on
    rotary[1:, 2:6] = [[2, 2, 3, 3], [2, 3, 2, 3]]
    drafting, length, expected = Drafting(path, text), len(text), []
    for positions in (rotary, None):
        of_rows = None if positions is None else np.ascontiguousarray(positions[:, : length - 2])
        drafting.block.store(drafting.rows(1, length - 1)._replace(rotary=of_rows))
        rows, probabilities = drafting.rows(length - 1, length), []
        for at in range(length - 2, length - 2 + DEPTHS):
            kv_slots = drafting.kv_slots[at + 1 : at + 2]
            rows = rows._replace(positions=np.array([at], np.int32), kv_slots=kv_slots)
            rows = rows._replace(rotary=None if positions is None else positions[0, at : at + 1])
            table = np.ascontiguousarray(drafting.kv_slots[None, 1:])
            found = drafting.block.predict(rows, np.zeros(1, np.int32), table)
            probabilities.append(float(found.probabilities[0]))
            rows = rows._replace(token_ids=found.token_ids, states=found.states.clone())
        expected.append(probabilities)
    block = Trunk(path).block

    each, none = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
    slots = np.arange(LENGTH, dtype=np.int32)[::-1].copy()
    before = np.concatenate([rotary[:, :1], rotary[:, : length - 1]], axis=1)
    columns = np.stack([text, each, slots[:length], none])
    for first in range(0, length, REQUESTS):
        part = slice(first, first + REQUESTS)

        def states_of_the_cpu(
            _norm: Any, _count: Any, out: GpuActivations, *_: Any, part: slice = part
        ) -> None:
            assert out.x is not None
            out.x.copy_(drafting.states[part])

        ids, positions, kv_slots, requests = ints(columns[:, part].copy())
        batch = GpuBatch(counter(REQUESTS), ids, positions, kv_slots, requests, REQUESTS, None)
        block.take_step(replace(batch, rotary_before=ints(before[:, part].T.copy())), states_of_the_cpu)
    block._kept.states[0] = drafting.states[length - 2].to(DEV)
    block._slots_ahead[0, : LENGTH - 1] = ints(slots[1:])
    chain, one = NextTokenChain(block, DEV, REQUESTS, lambda: NO_STEP), np.zeros(1, np.int32)
    start = ChainStart(
        np.array(text[-1:], np.int32), one + length - 2, one, one + DEPTHS,
        slots[length - 1 : length - 1 + DEPTHS, None],
        rotary=np.ascontiguousarray(rotary.T[length - 2 : length - 2 + DEPTHS, None]),
    )  # fmt: skip
    _, found_likely = chain.draft(start)
    assert found_likely[:, 0] == pytest.approx(expected[0], rel=2e-3)
    assert expected[1] != pytest.approx(expected[0], rel=2e-2)  # by the tokens' numbers


def on_the_cpu(path: Path, text: list[int]) -> list[int]:
    """What the CPU's block drafts behind a text."""
    drafting, length, drafts = Drafting(path, text), len(text), []
    drafting.block.store(drafting.rows(1, length - 1))
    rows = drafting.rows(length - 1, length)
    for number in range(DEPTHS):
        table = np.ascontiguousarray(drafting.kv_slots[None, 1:])
        found = drafting.block.predict(rows, np.zeros(1, np.int32), table)
        drafts.append(int(found.token_ids[0]))
        at = length + number
        rows = rows._replace(
            token_ids=found.token_ids, states=found.states.clone(), positions=np.array([at - 1], np.int32),
            kv_slots=drafting.kv_slots[at : at + 1],
        )  # fmt: skip
    return drafts


def engine_of(path: Path, **options: object) -> Runner:
    config = small_config(
        path, threads=1, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32, max_total_tokens=64,
        speculative_config=f'{{"method": "mtp", "num_speculative_tokens": {DEPTHS}}}', **options,
    )  # fmt: skip
    return load_gpu_runner(config, open_model(path), lambda *_: None, DEV, Start())


@pytest.mark.parametrize("name", ["glm4moe", "bailing3"])
def test_an_engine(name: str, wide_fixtures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is the one without drafts, and behind right, wrong and unlikely drafts the block drafts what the CPU's
    does. The step that verifies drafts is launched before the host knows them."""
    path = model_of(name, wide_fixtures)
    runner = engine_of(path)
    requests = asked(1, runner.ready().vocab_size, length=5, max_tokens=8, temperature=1.0)
    expected, _ = serve(runner, requests, 0, max_num_batched_tokens=8)
    planted = Planted(runner, whole_texts(requests, expected), monkeypatch)
    always_draft(monkeypatch, DEPTHS)
    placed: list[list[int]] = []
    place = GpuDraftingBlock.place_drafts

    def noted(self: GpuDraftingBlock, ids: torch.Tensor, count: torch.Tensor) -> None:
        place(self, ids, count)
        placed.append(ids[: int(count[0])].tolist())

    monkeypatch.setattr(GpuDraftingBlock, "place_drafts", noted)
    found, report = serve(runner, requests, DEPTHS, max_num_batched_tokens=8)
    assert [answer.tokens for answer in found.values()] == [answer.tokens for answer in expected.values()]
    assert 0 < report.accepted_draft_tokens < report.draft_tokens
    assert len(placed) == len(planted.noted) > 2
    assert sum(len(ids) - 1 for ids in placed) == report.draft_tokens < DEPTHS * len(placed)
    for text, draft in planted.noted:
        assert draft == on_the_cpu(path, text)[: len(draft)]


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("glm4moe", {"n_gpu_layers": 2}),
        ("glm4moe", {"num_gpu_experts": 4, "gpu_prefill_token_threshold": 1000}),
        ("families/tiny-qwen35moe-f16", {"n_gpu_layers": 2}),
    ],
    ids=["first layers", "experts", "first recurrent layers"],
)
def test_with_a_part_in_ram(
    name: str, placement: dict[str, Any], wide_fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers are those without drafts, and the block drafts what the CPU's does: where the first layers are on the
    CPU, whose recurrent states move by accepted drafts alone, and where some experts are in RAM and a cache moves
    them, which counts the experts of drafted rows."""
    path = model_of(name, wide_fixtures)
    runner = engine_of(path, **placement)
    engine = runner.engine
    assert isinstance(engine, GpuEngine)
    requests = asked(1, runner.ready().vocab_size, length=5, max_tokens=6, temperature=1.0)
    limits: dict[str, Any] = {"max_num_batched_tokens": 8, "reuse_prefixes": False}
    expected, _ = serve(runner, requests, 0, **limits)
    planted = Planted(runner, whole_texts(requests, expected), monkeypatch)
    always_draft(monkeypatch, DEPTHS)
    rows, counts = [], []
    forward = engine.forward

    def noted(layout: StepLayout, *args: Any, **more: Any) -> None:
        rows.append(layout.n)
        counts.append(engine.expert_counts())
        forward(layout, *args, **more)

    monkeypatch.setattr(engine, "forward", noted)
    found, report = serve(runner, requests, DEPTHS, **limits)
    assert [answer.tokens for answer in found.values()] == [answer.tokens for answer in expected.values()]
    assert 0 < report.accepted_draft_tokens < report.draft_tokens
    assert len(planted.noted) > 2
    for text, draft in planted.noted:
        assert draft == on_the_cpu(path, text)[: len(draft)]
    counts.append(engine.expert_counts())
    tokens = np.diff([count.tokens for count in counts], axis=0)  # of each step
    each = np.array(rows)[:, None] * runner.ready().experts_per_token
    assert ((tokens.sum(axis=2) == each) | (tokens.sum(axis=2) == 0)).all()  # dense layers have none
    if "num_gpu_experts" in placement:  # an expert of a step counts once
        first, last = counts[0].cache, counts[-1].cache
        assert first is not None
        assert last is not None
        assert last.hits + last.misses - first.hits - first.misses == (tokens > 0).sum()


@pytest.mark.skipif(DEVICE == "cuda", reason="the clocks are made up")
def test_times_of_drafts_beside_first_layers_in_ram(
    wide_fixtures: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What these layers take is part of a step's layers, and no wait for the host."""
    runner = engine_of(model_of("glm4moe", wide_fixtures), n_gpu_layers=2)
    always_draft(monkeypatch, DEPTHS)
    requests = asked(1, runner.ready().vocab_size, length=5, max_tokens=6)
    times = {"link_ms": 2.0, "layers_ms": 10.0, "reading_ms": 3.0, "placing_ms": 4.0, "stage_ms": 20.0}
    clock = GpuClock(runner, monkeypatch, **times)
    serve(runner, requests, DEPTHS, max_num_batched_tokens=8, reuse_prefixes=False)
    drafted = [one for one in clock.results if any(row.accepted for row in one.sampled)]
    assert len(drafted) > 2
    for one in drafted:
        assert one.compute_ms - one.draft_ms - one.draft_wait_ms == pytest.approx(30.0)
        assert one.draft_wait_ms == pytest.approx(7.0)
