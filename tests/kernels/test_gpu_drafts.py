"""Drafts on a GPU engine under Triton's interpreter: texts are those without drafts, whatever tokens depend on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.launch import first_launches
from moeserve.messages.schema import GenerateRequest
from moeserve.models.open import open_dummy_model, open_model
from moeserve.router.core.policy.draft_length import DraftLength
from moeserve.worker.loading.gpu.load import load_gpu_runner
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner
from tests.conftest import OWN_FIXTURES
from tests.gpu.driver import small_config
from tests.support.foreseen_drafts import Foreseen, asked, whole_texts
from tests.support.model_header import qwen3moe, write_header
from tests.support.served_answers import serve

MOST = 3
NGRAM = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 6}'
ANSWER = 40 if DEVICE == "cuda" else 5  # the interpreter takes seconds for a token

pytestmark = pytest.mark.slow  # minutes in the interpreter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "small.gguf"
    shape = qwen3moe(
        hidden_size=256, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=128, num_experts=4, top_k=2,
        expert_width=256, context_length=128, vocab_size=128,
    )  # fmt: skip
    write_header(path, shape)
    return path


def runner_of(model: Path, **options: object) -> Runner:
    config = small_config(
        model, load_format="dummy", threads=1, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64,
        max_total_tokens=256, speculative_config=NGRAM, **options,
    )  # fmt: skip
    return load_gpu_runner(config, open_dummy_model(model), lambda *_: None, torch.device(DEVICE), Start())


RECURRENT = OWN_FIXTURES / "tiny-qwen3next-q4_k_m.gguf"


def test_recurrent_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The states move by accepted drafts alone."""
    config = small_config(
        RECURRENT, threads=1, max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, max_total_tokens=256,
        speculative_config=NGRAM, state_snapshot_budget=0.0,
    )  # fmt: skip
    runner = load_gpu_runner(config, open_model(RECURRENT), lambda *_: None, torch.device(DEVICE), Start())
    requests = asked(1, runner.ready().vocab_size, length=6, max_tokens=ANSWER, temperature=1.0)
    compare(runner, requests, monkeypatch)


CASES = {
    "drawn, all on the GPU": (4, 2, {"temperature": 1.0, "logprobs": None}),
    "penalties, half in RAM": (2, 1, {"temperature": 0.0, "presence_penalty": 0.5}),
}


@pytest.mark.parametrize(("experts", "streams", "sampling"), CASES.values(), ids=CASES)
def test_same_texts(
    model: Path, experts: int, streams: int, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of drafted positions are sampled at once, and in rounds where they depend on one another."""
    runner = runner_of(model, num_gpu_experts=experts)
    requests = asked(streams, runner.ready().vocab_size, length=20, **({"max_tokens": ANSWER} | sampling))
    compare(runner, requests, monkeypatch)


def compare(runner: Runner, requests: list[GenerateRequest], monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers with drafts, some of them right, are those without."""
    expected, _ = serve(runner, requests, 0, max_num_batched_tokens=32)
    assert runner._drafts is not None
    runner._drafts._drafter = Foreseen(
        runner._sequences.tokens, whole_texts(requests, expected), 0.8, seed=11
    )
    launched = first_launches()
    monkeypatch.setattr(
        DraftLength, "choose", lambda self, records, *_: ([MOST] * len(records), float(MOST * len(records)))
    )
    found, report = serve(runner, requests, MOST, max_num_batched_tokens=32)
    assert {id: answer.tokens for id, answer in found.items()} == {
        id: answer.tokens for id, answer in expected.items()
    }
    assert report.accepted_draft_tokens > 0
    assert first_launches() == launched  # all was compiled before the first request
