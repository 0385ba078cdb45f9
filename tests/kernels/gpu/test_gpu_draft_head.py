"""EAGLE-3 heads on a GPU: their scores and drafts beside the published modelling code's, and the model's texts."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.next_token.op import SampledStep
from moeserve.kv.cache import KvCache
from moeserve.kv.layout import KvLayout
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.blocks.gpu.draft_head import PlacedDraftHead
from moeserve.models.blocks.gpu.workspace import GpuBatch
from moeserve.models.eagle3.folder import open_draft_head_folder
from moeserve.models.eagle3.shape import read_draft_head
from moeserve.models.loading.gpu_draft_head import GpuDraftHeadLoader
from moeserve.models.loading.gpu_loader import GpuLoader
from moeserve.models.open import open_model
from moeserve.models.registry import read_checked_shape
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.router.core.request import DraftRecord
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.next_token_chain import ChainStart, NextTokenChain
from moeserve.worker.engines.gpu.steps.cuda_graphs import CudaGraphs, Launches
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from moeserve.worker.sequences import StepLayout
from tests.gpu.driver import small_config
from tests.support.models.eagle3_head import Head
from tests.support.models.eagle3_target import Target
from tests.support.models.hugging_face_model import read_model, write_model
from tests.support.models.hugging_face_settings import SETTINGS
from tests.support.models.rounded_kv import round_kv
from tests.support.worker.foreseen_drafts import asked, whole_texts
from tests.support.worker.gpu_clock import GpuClock
from tests.support.worker.launched_ahead import LaunchedAhead
from tests.support.worker.planted_drafts import Planted, always_draft
from tests.support.worker.served_answers import Told, serve

HIDDEN, VOCAB, DEPTHS = SETTINGS["hidden_size"], SETTINGS["vocab_size"], 2
LENGTH, REQUESTS, ROWS = 32, 2, 16
DEV = torch.device(DEVICE)
NO_STEP = SampledStep(*torch.zeros(3, 1, dtype=torch.int32, device=DEV))
# Each setting of a head is in one of them and not in the other: the interpreter takes 8 s of CPU for each.
HEADS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "maps": ([1, 2], {"scored": 512, "has_embedding": True}),
    "norms": ([0, 1, 2], {"norm_before_residual": True, "has_more_norms": True}),
}

# The bound is one of 32-bit floats, which only the interpreter multiplies.
MISSED = pytest.mark.xfail(reason="products in bfloat16 are further from the published code's", strict=False)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A mixture of experts, whose routers are fused with the norms before them in steps of few rows."""
    path = tmp_path_factory.mktemp("target") / "model"
    write_model(path, torch.float32, num_hidden_layers=2)
    return Target(path, read_model(path))


def engine_of(path: Path, head: Path, **options: object) -> Runner:
    drafts = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DEPTHS}
    config = small_config(
        path, threads=1, max_num_seqs=2, max_num_batched_tokens=16, max_model_len=32, max_total_tokens=64,
        speculative_config=json.dumps(drafts), **options,
    )  # fmt: skip
    return load_gpu_runner(config, open_model(path), lambda *_: None, DEV, Start())


class Driven:
    """A model and its head on a GPU, driven by hand: a text in request slot 0."""

    def __init__(self, path: Path, folder: Path) -> None:
        source, head_source = open_model(path), open_draft_head_folder(folder)
        shape = read_checked_shape(source)
        ids = [range(layer.num_experts) for layer in shape.layers]
        weights = GpuLoader(source, shape, DEV, lambda *_: None).load(ids)
        head = read_draft_head(head_source, shape)
        of_head = GpuDraftHeadLoader(head_source, head, DEV, lambda *_: None).load_head(shape)
        own_kv = KvCache(KvLayout(head.own), LENGTH, range(1), DEV, zeroed=True).layers[0]
        self.tables = SlotTables.empty(REQUESTS + 1, LENGTH, DEV, has_windows=False)
        self.decoder = GpuDecoder(
            shape,
            weights,
            KvCache(KvLayout(shape), LENGTH, range(shape.num_layers), DEV, zeroed=True).layers,
            self.tables.slots,
            ROWS,
            LENGTH,
            slots_ahead=self.tables.ahead,
            max_drafts=DEPTHS,
            draft_head=PlacedDraftHead(head, of_head, own_kv, LENGTH),
        )
        assert self.decoder.next_token is not None
        self.block = self.decoder.next_token
        self.chain = NextTokenChain(self.block, DEV, REQUESTS, lambda: NO_STEP)
        self.slots = np.arange(LENGTH, dtype=np.int32)[::-1].copy()  # any order

    def read(self, tokens: list[int], chunks: list[int]) -> None:
        """Computes a text in chunks of these lengths."""
        first = 0
        for n in chunks:
            part, size = np.arange(first, first + n, dtype=np.int32), 1 << (n - 1).bit_length()
            columns = np.zeros((4, size), np.int32)
            columns[:, :n] = np.array(tokens, np.int32)[part], part, self.slots[part], part * 0
            columns[2, n:], columns[3, n:] = -1, REQUESTS
            token_ids, positions, kv_slots, requests = ints(columns)
            batch = GpuBatch(counter(n), token_ids, positions, kv_slots, requests, size, None)
            self.decoder.begin(batch)
            self.decoder.forward(batch)
            self.decoder.keep_up(batch)
            first += n

    def links(self, token: int, position: int) -> tuple[list[int], list[torch.Tensor]]:
        """The drafts behind the last token of the text, and the scores of each: float32 [scored]."""
        one, seen = np.zeros(1, np.int32), []
        for depths in range(1, DEPTHS + 1):  # a chain's last scores alone are kept
            planned = self.slots[position : position + depths, None]
            start = ChainStart(np.array([token], np.int32), one + position - 1, one, one + depths, planned)
            drafts, _ = self.chain.draft(start)
            seen.append(self.block.logits(1)[0].cpu().clone())
        return drafts[:, 0].tolist(), seen


@pytest.mark.parametrize("name", HEADS)
def test_scores_and_drafts(
    name: str,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Behind a prompt in chunks of few and of many rows, stored a few rows at a time."""
    if DEVICE == "cuda":
        request.applymarker(MISSED)
    monkeypatch.setattr("moeserve.models.blocks.gpu.drafting_block.NEXT_TOKEN_ROWS", 8)
    taps, options = HEADS[name]
    head = Head(HIDDEN, VOCAB, taps, **options)
    driven = Driven(target.path, head.write_folder(tmp_path / "head"))
    text = [(37 * at * at + 11) % VOCAB for at in range(12)]
    last = len(text) - 1  # its row is the chain's first
    driven.read(text, [2, 9])
    round_kv(target.model, monkeypatch)
    states = head.states(target.residuals(text, taps))
    assert driven.block._kept.position[0] == last
    drafts, seen = driven.links(text[last], last)
    table = target.model.model.embed_tokens.weight.detach()
    truth = head.chain(table, text, states[:last], DEPTHS)
    likeliest = [int(scores.argmax()) for scores in truth]
    assert drafts == (likeliest if head.ids is None else head.ids[likeliest].tolist())
    for ours, theirs in zip(seen, truth, strict=True):
        kl = torch.nn.functional.kl_div(
            ours.log_softmax(0), theirs.log_softmax(0), log_target=True, reduction="sum"
        )
        assert abs(float(kl)) < 1e-5


@pytest.mark.slow  # a minute each in the interpreter
@pytest.mark.parametrize("name", HEADS)
def test_drafts_and_texts(
    name: str,
    target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Behind a prompt in chunks of few and of many rows, stored a few rows at a time, and behind right, wrong and
    unlikely drafts; and the text is the one without drafts."""
    monkeypatch.setattr("moeserve.models.blocks.gpu.drafting_block.NEXT_TOKEN_ROWS", 8)
    taps, options = HEADS[name]
    head = Head(HIDDEN, VOCAB, taps, **options)
    runner = engine_of(target.path, head.write_folder(tmp_path / "head"))
    requests = asked(1, VOCAB, length=20, max_tokens=8, temperature=1.0)
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "reuse_prefixes": False}
    expected, _ = serve(runner, requests, 0, **limits)
    planted = Planted(runner, whole_texts(requests, expected), monkeypatch)
    always_draft(monkeypatch, DEPTHS)
    found, report = serve(runner, requests, DEPTHS, **limits)
    assert [answer.tokens for answer in found.values()] == [answer.tokens for answer in expected.values()]
    assert 0 < report.accepted_draft_tokens < report.draft_tokens
    assert len(planted.noted) > 2
    if DEVICE == "cuda":
        request.applymarker(MISSED)
    text = whole_texts(requests, found)[0]
    round_kv(target.model, monkeypatch)
    states = head.states(target.residuals(text, taps))
    table = target.model.model.embed_tokens.weight.detach()
    for (before, drafts), logits in zip(planted.noted, planted.logits, strict=True):
        assert before == text[: len(before)]
        truth = head.chain(table, before, states[: len(before) - 1], len(drafts))
        likeliest = [int(scores.argmax()) for scores in truth]
        assert drafts == (likeliest if head.ids is None else head.ids[likeliest].tolist())
        ours, theirs = logits.log_softmax(0), truth[-1].log_softmax(0)
        kl = torch.nn.functional.kl_div(ours, theirs, log_target=True, reduction="sum")
        assert abs(float(kl)) < 1e-5


@pytest.mark.slow  # a minute each in the interpreter
@pytest.mark.parametrize(("streams", "every"), [(1, 1), (2, 1), (1, 2)])
def test_chains_launched_ahead(
    streams: int, every: int, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains are launched while the host knows neither the tokens before them nor how many drafts are accepted: texts,
    drafts and their scores have the bits of chains that are launched when both are known, by the same kernels for as
    many rows. Also where only each other step has drafts."""
    head = Head(HIDDEN, VOCAB, [1, 2], scored=512)
    runner = engine_of(target.path, head.write_folder(tmp_path / "head"))
    requests = asked(streams, VOCAB, length=6, max_tokens=7, temperature=1.0, logprobs=None)
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "reuse_prefixes": False}
    without, _ = serve(runner, requests, 0, **limits)

    def drafted(found: list[list[int]] | None) -> tuple[list[list[int]], Planted]:
        """found: the texts; None: chains are launched when the host knows the tokens before them."""
        number = itertools.count()

        def choose(self: DraftLength, records: Sequence[DraftRecord], *_: Any) -> tuple[list[int], float]:
            depths = DEPTHS if next(number) % every == 0 else 0
            return [depths] * len(records), float(depths * len(records))

        def during(world: Told, _: int) -> None:
            ahead.world = None if found is None else world

        ahead = LaunchedAhead(runner)
        with monkeypatch.context() as patch:
            patch.setattr(DraftLength, "choose", choose)
            planted = Planted(runner, whole_texts(requests, without), patch, found)
            answers, report = serve(ahead, requests, DEPTHS, during, **limits)
        assert 0 < report.accepted_draft_tokens < report.draft_tokens
        return whole_texts(requests, answers), planted

    texts, late = drafted(None)
    assert late.num_after_step == 0
    if DEVICE == "cpu":  # a GPU's kernels for more rows have other roundings
        assert texts == whole_texts(requests, without)
    early_texts, early = drafted(texts)
    assert early.num_after_step > 1
    assert early_texts == texts
    assert early.noted == late.noted
    for ours, theirs in zip(early.logits, late.logits, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow  # a minute in the interpreter
def test_steps_with_which_a_head_does_not_keep_up(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the router says so, the KV of the steps' rows is zeroed, before the head keeps up again, and the next step
    has no drafts; later ones have, and the text is the same."""
    head = Head(HIDDEN, VOCAB, [1, 2], scored=512)
    runner = engine_of(target.path, head.write_folder(tmp_path / "head"))
    requests = asked(1, VOCAB, length=6, max_tokens=10, temperature=1.0, logprobs=None)
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "reuse_prefixes": False}
    expected, _ = serve(runner, requests, 0, **limits)
    always_draft(monkeypatch, 1)
    kept, number = [True, True, False, *[True] * 20], itertools.count()  # the first plan has the prompt
    monkeypatch.setattr(DraftLength, "keeps_block", property(lambda _: kept[next(number)]))
    Planted(runner, whole_texts(requests, expected), monkeypatch)
    engine, seen, before = runner.engine, [], [0]
    assert isinstance(engine, GpuEngine)
    assert engine.block_steps is not None
    forward, keys = engine.forward, engine.block_steps._block._kv.keys

    def noted(layout: StepLayout, *args: Any, **more: Any) -> None:
        forward(layout, *args, **more)
        drafts = 0 if layout.drafted is None else int(layout.drafted[0])
        seen.append((drafts > 0, bool(keys[before[-1]].any())))  # of the step before
        before.append(int(layout.kv_slots[layout.n - 1 - drafts]))

    monkeypatch.setattr(engine, "forward", noted)
    found, _ = serve(runner, requests, 1, **limits)
    assert [answer.tokens for answer in found.values()] == [answer.tokens for answer in expected.values()]
    assert [has_row for _, has_row in seen[1:]] == kept[: len(seen) - 1]
    assert [has_drafts for has_drafts, _ in seen[:5]] == [False, True, True, False, True]


@pytest.mark.slow  # two minutes in the interpreter
def test_graphs_captured_between_steps(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that puts off its start drafts with what is not captured yet, and what it captures leaves the texts'
    rows and states: drafts and their scores have the bits of a worker that has captured all before."""
    head = Head(HIDDEN, VOCAB, [1, 2], scored=512)
    runner = engine_of(target.path, head.write_folder(tmp_path / "head"))
    requests = asked(1, VOCAB, length=6, max_tokens=4, logprobs=None)
    limits: dict[str, Any] = {"max_num_batched_tokens": 16, "reuse_prefixes": False}
    without, _ = serve(runner, requests, 0, **limits)
    steps, chain = runner.engine.block_steps, runner.engine.next_token_chain  # type: ignore[attr-defined]

    def capture(self: CudaGraphs, launches: Launches, before: Launches) -> Launches:
        before()
        launches()
        return launches

    monkeypatch.setattr(CudaGraphs, "capture", capture)  # in the interpreter, too, it runs what it captures
    always_draft(monkeypatch, DEPTHS)

    def drafted(during: Callable[[Told, int], None]) -> Planted:
        with monkeypatch.context() as patch:
            planted = Planted(runner, whole_texts(requests, without), patch)
            serve(runner, requests, DEPTHS, during, **limits)
        return planted

    early = drafted(lambda *_: None)
    for captured in (steps._captured, chain._links):
        captured.clear()
    pieces = itertools.chain(steps.capture_each(), chain.capture_each())
    late = drafted(lambda *_: next(pieces, None))
    assert steps._captured
    assert len(early.noted) > 1
    assert late.noted == early.noted
    for ours, theirs in zip(late.logits, early.logits, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.slow  # a minute each in the interpreter
@pytest.mark.skipif(DEVICE == "cuda", reason="the clocks are made up")
@pytest.mark.parametrize(("streams", "is_likely"), [(1, True), (2, True), (2, False)])
def test_times_of_chains_launched_ahead(
    streams: int, is_likely: bool, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU's time is a step's drafts, its layers, and its wait for the host, wherever the drafts were launched. Also
    where none of them is likely, so that the step has none: it waited for them."""
    head = Head(HIDDEN, VOCAB, [1, 2], scored=512)
    runner = engine_of(target.path, head.write_folder(tmp_path / "head"))
    always_draft(monkeypatch, DEPTHS)
    requests = asked(streams, VOCAB, length=6, max_tokens=7, logprobs=None)
    clock = GpuClock(runner, monkeypatch, link_ms=2.0, layers_ms=10.0, reading_ms=3.0, placing_ms=4.0)
    if not is_likely:
        monkeypatch.setattr(runner._drafts._drafter._second, "_least", 2.0)  # type: ignore[union-attr]
    ahead = LaunchedAhead(runner)

    def during(world: Told, _: int) -> None:
        ahead.world = world

    serve(ahead, requests, DEPTHS, during, max_num_batched_tokens=16, reuse_prefixes=False)
    drafted = [one for one in clock.results if len(one.sampled) == streams and one.draft_ms]
    assert len(drafted) > 2
    for one in drafted[1:]:  # the first one's drafts were launched when the tokens before them were known
        made = [row.accepted.drafted for row in one.sampled if row.accepted]
        assert len(made) == streams * is_likely
        chain_ms = 2.0 * max(made) if made else one.draft_ms  # unlikely ones are not told
        # From the end of the step before: the host reads its drafts for 3 ms, with several requests waits for the
        # next ones, and takes 4 ms to launch the layers.
        reading_ms = 3.0 if made else 0.0
        launched_ms = (reading_ms if streams == 1 else max(reading_ms, chain_ms)) + 4.0
        assert one.draft_ms == pytest.approx(chain_ms)
        assert one.draft_wait_ms == pytest.approx(launched_ms - chain_ms)
        assert one.compute_ms - one.draft_ms - one.draft_wait_ms == pytest.approx(10.0)


@pytest.mark.slow  # a minute in the interpreter
@pytest.mark.skipif(DEVICE == "cuda", reason="the clocks are made up")
def test_times_where_a_step_follows_one_that_asked_in_vain(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each other step asks, and no draft is likely. The step after it is launched while it runs, for which the host
    takes longer than the GPU for the layers: that is no part of its time, and its chain is no wait."""
    head = Head(HIDDEN, VOCAB, [1, 2], scored=512)
    runner = engine_of(target.path, head.write_folder(tmp_path / "head"))
    requests = asked(2, VOCAB, length=6, max_tokens=9, logprobs=None)
    number = itertools.count()

    def choose(self: DraftLength, records: Sequence[DraftRecord], *_: Any) -> tuple[list[int], float]:
        depths = DEPTHS if next(number) % 2 == 0 else 0
        return [depths] * len(records), float(depths * len(records))

    monkeypatch.setattr(DraftLength, "choose", choose)
    clock = GpuClock(runner, monkeypatch, link_ms=2.0, layers_ms=1.5, reading_ms=3.0, placing_ms=4.0)
    # Before it asks for drafts, which the GPU is computing then.
    clock._add(monkeypatch, runner._orders, "execute", 1.0, 0.0)
    monkeypatch.setattr(runner._drafts._drafter._second, "_least", 2.0)  # type: ignore[union-attr]
    ahead = LaunchedAhead(runner)

    def during(world: Told, _: int) -> None:
        ahead.world = world

    serve(ahead, requests, DEPTHS, during, max_num_batched_tokens=16, reuse_prefixes=False)
    in_vain = [one for one in clock.results if len(one.sampled) == 2 and one.draft_ms]
    assert len(in_vain) > 2
    for one in in_vain[1:-1]:
        assert one.draft_ms == pytest.approx(2.0 * DEPTHS)
        assert one.draft_wait_ms == pytest.approx(4.0)  # placing the step's rows
        assert one.compute_ms - one.draft_ms - one.draft_wait_ms == pytest.approx(1.5)
