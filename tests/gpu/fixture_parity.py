"""Fixtures through a runner on a GPU, beside llama.cpp's figures for them.

The truth is Hugging Face's: logits of its own model in float32 on the file's dequantised weights.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeserve.messages.sampling import TokenLogprob
from tests.conftest import fixtures_dir
from tests.gpu.bounds import assert_near
from tests.gpu.driver import Driver
from tests.support.measuring.accuracy import Fixture, agreed_length, distances, top_of

TYPES = ("bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "iq4_xs")
BOOKS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")
# Families that are there in one type. Not laguna, which misses in chunks of 7 and 1: docs/results/accuracy.md.
MORE = (
    "llamadense",
    "mixtral",
    "qwen2",
    "qwen35",
    "qwen3vlmoe",
    "hyv3",
    "dots1",
    "olmoe",
    "ernie45moe",
    "exaonemoe",
    "granitemoe",
    "mistral4",
    "gemma4dense",
    "afmoe",
    "step35",
    "hunyuanmoe",
    "llama4",
    "mimo2",
    "nemotronhmoe",
    "granitehybrid",
    "lfm2moe",
)
NAMES = [
    *(f"tiny-qwen3moe-{name}" for name in TYPES),
    *(f"next/tiny-qwen3moe-{name}" for name in ("nvfp4", "q1_0", "q2_0", "tq1_0", *BOOKS)),
    "next/tiny-qwen35moe-iq2_xxs",
    *(f"families/tiny-qwen2moe-{name}" for name in ("f16", "q8_0", "q4_k_m")),
    *(f"families/tiny-qwen3-{name}" for name in ("f16", "q4_k_m")),
    *(f"families/tiny-gptoss-{name}" for name in ("f16", "q8_0", "mxfp4")),
    *(f"families/tiny-glm4moe-{name}" for name in ("f16", "q4_k_m")),
    *(f"families/tiny-minimaxm2-{name}" for name in ("f16", "q4_k_m")),
    *(f"families/tiny-qwen3next-{name}" for name in ("f16", "q4_k_m")),
    *(f"families/tiny-qwen35moe-{name}" for name in ("f16", "q8_0", "q4_k_m")),
    *(f"families/tiny-deepseek2-{name}" for name in ("f16", "q8_0", "q4_k_m")),
    *(f"families/tiny-gemma4-{name}" for name in ("f16", "q4_k_m")),
    *(f"families/tiny-{name}-q4_k_m" for name in MORE),
    "next/tiny-kimilinear-f16",
    "next/tiny-bailing3-f16",
    "next/tiny-gemma4e-f16",
    "next/tiny-glmdsa-f16",
    "next/tiny-qwen4exp-f16",
    "next/tiny-minimaxm3-f16",
]
# As near to the truth as the others, but of 144 positions three or four have another first token in decode steps, whose
# margins are the least: docs/results/accuracy.md.
TIED = ("tiny-hunyuanmoe-q4_k_m", "tiny-mimo2-q4_k_m")
CHUNKS = [
    512,
    33,
    7,
    1,
]  # tensor cores, tensor cores in chunks, integer products, decode steps in CUDA graphs


def load_fixture(name: str) -> Fixture:
    """Skips the test where there is none of that name."""
    golden = fixtures_folder() / f"{name}.golden.json"
    if not golden.exists():
        pytest.skip(f"there is no {golden}")
    return Fixture.load(golden)


def model_of(fixture: Fixture) -> Path:
    (model,) = fixtures_folder().rglob(f"{fixture.name}.gguf")
    return model


def fixtures_folder() -> Path:
    folder = fixtures_dir()
    if folder is None:
        pytest.skip("the wider fixtures are not here (MOESERVE_FIXTURES)")
    return folder


def tops(entries: list[TokenLogprob]) -> list[dict[int, float]]:
    return [dict(zip(e.top_ids, e.top_logprobs, strict=True)) for e in entries]


def check_distance(driver: Driver, fixture: Fixture, chunk: int, said: str) -> None:
    """From the truth, of prompts in chunks of so many tokens: no larger than llama.cpp's. said: before the figures."""
    mine = [top for case in fixture.cases for top in tops(driver.score(0, case.tokens, chunk))]
    truth = np.concatenate([case.truth for case in fixture.cases])
    ours = distances(truth, mine)
    rival = distances(truth, [row for case in fixture.cases for row in top_of(case.llama_cpp)])
    print(
        f"{said}: median KL {ours.median_kl:.2e} (llama.cpp {rival.median_kl:.2e}), "
        f"top-1 {ours.top1:.2%} ({rival.top1:.2%})"
    )
    assert_near(ours, rival)


def check_greedy_text(driver: Driver, fixture: Fixture) -> None:
    """Equal to llama.cpp's up to the first step at which its margin is small, where neither quantises activations."""
    equal = 0
    for case in fixture.cases:
        count = agreed_length(case)
        equal += driver.generate(0, case.tokens, max(count, 1))[:count] == case.greedy[:count]
    print(f"GREEDY {fixture.name}: {equal} of {len(fixture.cases)} texts equal")
    if fixture.name.endswith("f16"):
        assert equal == len(fixture.cases)
