"""EAGLE-3 heads beside a model on the CPU: their scores beside published modelling code's, and the model's texts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from moeserve.errors import ConfigError
from moeserve.models.blocks.cpu.draft_head import CpuDraftHeadBlock
from moeserve.models.blocks.cpu.next_token import NextTokenRows, Predicted
from moeserve.models.errors import ModelError
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.drafts.drafter import Wanted
from moeserve.worker.drafts.next_token_drafter import NextTokenDrafter
from moeserve.worker.loading import drafting
from moeserve.worker.loading.cpu.load import build_cpu_runner
from moeserve.worker.sequences import Int32s
from tests.support.models.eagle3_head import Head
from tests.support.models.eagle3_target import Target
from tests.support.models.hugging_face_model import write_family
from tests.support.models.hugging_face_settings import SETTINGS
from tests.support.models.rounded_kv import round_kv
from tests.support.worker.foreseen_drafts import asked, whole_texts
from tests.support.worker.served_answers import load, serve

HIDDEN, VOCAB, TAPS, DRAFTS = SETTINGS["hidden_size"], SETTINGS["vocab_size"], [1, 2, 3], 3


def speculative(head: Path, method: str = "eagle3") -> str:
    return json.dumps({"method": method, "model": str(head), "num_speculative_tokens": DRAFTS})


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("target") / "model"
    model = write_family(path, "qwen3", torch.float32)
    return Target(path, model.from_pretrained(path, dtype=torch.float32))


class Link(NamedTuple):
    position: int
    token: int
    logits: torch.Tensor  # float32 [scored]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts, whatever they bring, and however unlikely the head finds them."""
    monkeypatch.setattr(drafting, "least_probability", lambda _config: 0.0)
    monkeypatch.setattr(DraftLength, "keeps_block", property(lambda _self: True))
    monkeypatch.setattr(
        DraftLength, "choose", lambda _self, records, *_: ([DRAFTS] * len(records), float(DRAFTS))
    )


class Links:
    """The head's links, of a request that is alone, by chain."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chains: list[list[Link]] = []
        predict, draft = CpuDraftHeadBlock.predict, NextTokenDrafter.draft

        def begun(drafter: NextTokenDrafter, wanted: Sequence[Wanted]) -> list[Int32s]:
            self.chains.append([])
            return draft(drafter, wanted)

        def noted(block: CpuDraftHeadBlock, rows: NextTokenRows, *args: Any) -> Predicted:
            link = int(rows.positions[0]), int(rows.token_ids[0])
            found = predict(block, rows, *args)
            self.chains[-1].append(Link(*link, block._space.logits[0].clone()))
            return found

        monkeypatch.setattr(NextTokenDrafter, "draft", begun)
        monkeypatch.setattr(CpuDraftHeadBlock, "predict", noted)

    @property
    def all(self) -> list[Link]:
        return [link for chain in self.chains for link in chain]


HEADS: dict[str, dict[str, Any]] = {
    "maps": {"scored": 512},
    "norms": {"scored": 512, "norm_before_residual": True, "has_more_norms": True},
    "whole": {"has_embedding": True, "norm_before_residual": True},
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", HEADS)
def test_scores_are_the_published_codes(
    name: str, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains behind a prompt in chunks and behind right and wrong drafts; and the text is the one without drafts."""
    head = Head(HIDDEN, VOCAB, TAPS, **HEADS[name])
    loaded = load(target.path, speculative_config=speculative(head.write_folder(tmp_path / "head")))
    runner = build_cpu_runner(loaded)
    requests = asked(1, VOCAB, length=20, max_tokens=9)
    limits: dict[str, Any] = {"max_num_batched_tokens": 7, "reuse_prefixes": False}
    expected, _ = serve(runner, requests, 0, **limits)
    links = Links(monkeypatch)
    found, report = serve(runner, requests, DRAFTS, **limits)
    assert found == expected
    assert report.draft_tokens > DRAFTS
    text = whole_texts(requests, found)[0]
    round_kv(target.model, monkeypatch)
    states = head.states(target.residuals(text, TAPS))
    table = target.model.model.embed_tokens.weight.detach()
    compared = 0
    for chain in filter(None, links.chains):
        length = chain[0].position + 2
        assert chain[0].token == text[length - 1]
        truth = head.chain(table, text[:length], states[: length - 1], len(chain))
        for link, theirs in zip(chain, truth, strict=True):
            ours = link.logits.log_softmax(0)
            kl = torch.nn.functional.kl_div(ours, theirs.log_softmax(0), log_target=True, reduction="sum")
            assert abs(float(kl)) < 1e-5
            compared += 1
    assert compared > 2 * DRAFTS


@pytest.mark.usefixtures("always")
def test_all_forms_are_one_head(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folders, llama.cpp's file, and the file by --speculative-model alone: the same drafts, bit for bit."""
    head = Head(HIDDEN, VOCAB, TAPS, scored=512)
    file = head.write_gguf(tmp_path / "head.gguf")
    forms: list[dict[str, Any]] = [
        {"speculative_config": speculative(head.write_folder(tmp_path / "head"))},
        {"speculative_config": speculative(head.write_speculators(tmp_path / "speculators"), "auto")},
        {"speculative_config": speculative(file)},
        {"speculative_model": str(file)},
    ]
    requests, seen = asked(1, VOCAB, length=9, max_tokens=6), []
    for form in forms:
        runner = build_cpu_runner(load(target.path, **form))
        with monkeypatch.context() as within:
            links = Links(within)
            serve(runner, requests, DRAFTS, max_num_batched_tokens=7)
        seen.append(links.all)
    assert len(seen[0]) > DRAFTS
    for others in seen[1:]:
        assert [link[:2] for link in others] == [link[:2] for link in seen[0]]
        assert all(torch.equal(one.logits, other.logits) for one, other in zip(seen[0], others, strict=True))


@pytest.mark.usefixtures("always")
def test_texts_of_a_crowd(target: Target, tmp_path: Path) -> None:
    """Sampled, with penalties, and prefix-cached: the texts and logprobs are those without drafts."""
    head = Head(HIDDEN, VOCAB, TAPS, scored=512)
    loaded = load(target.path, speculative_config=speculative(head.write_gguf(tmp_path / "head.gguf")))
    runner = build_cpu_runner(loaded)
    for sampling in ({}, {"temperature": 1.0, "presence_penalty": 0.7}):
        requests = asked(6, VOCAB, length=24, max_tokens=12, **sampling)
        expected, _ = serve(runner, requests, 0)
        found, _ = serve(runner, requests, DRAFTS)
        assert found == expected


def test_refusals(target: Target, tmp_path: Path) -> None:
    """What does not fit, or would be computed otherwise, is refused by name."""

    def start(head: Path, **options: Any) -> None:
        load(target.path, speculative_config=speculative(head), **options)

    wide = Head(64, VOCAB, TAPS, scored=512)
    with pytest.raises(ModelError, match=rf"residuals of 64 numbers, and the model's have {HIDDEN}"):
        start(wide.write_folder(tmp_path / "wide"))
    head = Head(HIDDEN, VOCAB, TAPS, scored=512)
    with pytest.raises(ModelError, match=r"'input_norm.weight' is missing"):
        start(head.write_folder(tmp_path / "normed", norm_before_fc=True))
    with pytest.raises(ModelError, match=r"'fc_norm' is True; only False"):
        start(head.write_folder(tmp_path / "each", fc_norm=True))
    with pytest.raises(ModelError, match=r"'attention_bias' is True; only False"):
        start(head.write_folder(tmp_path / "biased", attention_bias=True))
    far = Head(HIDDEN, VOCAB, [1, 2, 4], scored=512)
    with pytest.raises(ModelError, match=r"target_layers' has 4; 0 to 3"):
        start(far.write_gguf(tmp_path / "far.gguf"))
    head.ids = torch.arange(512) + VOCAB - 511
    with pytest.raises(ModelError, match=rf"'d2t' does not map to the model's {VOCAB} tokens"):
        start(head.write_gguf(tmp_path / "beyond.gguf"))
    with pytest.raises(ModelError, match="method eagle3 needs an EAGLE-3 head"):
        start(target.path)
    head.ids = torch.arange(512)
    with pytest.raises(ConfigError, match="--kv-disk: an EAGLE-3 head's keys"):
        start(head.write_gguf(tmp_path / "head.gguf"), kv_disk=str(tmp_path / "tier"))
