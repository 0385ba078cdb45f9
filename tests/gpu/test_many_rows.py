"""Steps of 128 and 256 decode rows: no farther from the truth than llama.cpp.

The tiles, and with them the order of additions, follow from the number of rows. Each row computes one position of a
fixture behind what comes before it, which was computed earlier; where a fixture has fewer positions than a step has
rows, some stand there twice.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from moeserve.messages.sampling import TokenLogprob
from moeserve.worker.engines.gpu.engine import GpuEngine
from moeserve.worker.engines.gpu.steps.expert_streaming import Streaming
from moeserve.worker.loading.load import load_runner
from tests.conftest import fixtures_dir
from tests.gpu.bounds import assert_near
from tests.gpu.driver import GREEDY, Driver, small_config
from tests.support.measuring.accuracy import Fixture, distances, top_of

if not torch.cuda.is_available():  # before each of a hundred cases is collected
    pytest.skip("needs a GPU", allow_module_level=True)

NAMES = [
    *(f"tiny-qwen3moe-{name}" for name in ("f16", "q8_0", "q4_k_m")),
    *("families/tiny-qwen2moe-q4_k_m", "families/tiny-qwen3-q4_k_m", "families/tiny-gptoss-mxfp4"),
    *("families/tiny-glm4moe-q4_k_m", "families/tiny-minimaxm2-q4_k_m", "families/tiny-qwen3next-q4_k_m"),
    *("families/tiny-qwen35moe-q4_k_m", "families/tiny-deepseek2-q4_k_m", "families/tiny-gemma4-q4_k_m"),
]
ROWS = (128, 256)
PLACEMENTS = {"all on the GPU": {}, "half of the experts in RAM": {"num_gpu_experts": 4}}


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", NAMES)
def test_distance_from_the_truth(name: str, placement: str) -> None:
    folder = fixtures_dir()
    if folder is None:
        pytest.skip("the wider fixtures are not here (MOESERVE_FIXTURES)")
    golden = folder / f"{name}.golden.json"
    if not golden.exists():
        pytest.skip(f"there is no {golden}")
    fixture = Fixture.load(golden)
    if placement != "all on the GPU" and "tiny-qwen3-" in name:
        pytest.skip("a model without experts")
    config = small_config(
        folder / f"{name}.gguf",
        device="cuda",
        threads=4,
        max_num_seqs=max(ROWS),
        max_total_tokens=1 << 15,
        **PLACEMENTS[placement],
    )
    runner = load_runner(config, lambda *_: None)
    assert isinstance(runner.engine, GpuEngine)
    runner.engine.stream_by(Streaming(((1, 0.0),)), "none streamed")
    driver = Driver(runner)
    truth = np.concatenate([case.truth for case in fixture.cases])
    rival = distances(truth, [row for case in fixture.cases for row in top_of(case.llama_cpp)])
    prefixes = [case.tokens[: end + 1] for case in fixture.cases for end in range(len(case.tokens))]
    for rows in ROWS:
        found = [top for _, top in zip(prefixes, at_once(driver, prefixes, rows), strict=False)]
        ours = distances(truth, [dict(zip(e.top_ids, e.top_logprobs, strict=True)) for e in found])
        print(
            f"ROWS {rows} {fixture.name}, {placement}: median KL {ours.median_kl:.2e} "
            f"(llama.cpp {rival.median_kl:.2e}), top-1 {ours.top1:.2%} ({rival.top1:.2%})"
        )
        assert_near(ours, rival)


def at_once(driver: Driver, prefixes: list[list[int]], rows: int) -> list[TokenLogprob]:
    """What follows each prefix, computed `rows` at a time; more at the end, of the first ones again."""
    found: list[TokenLogprob] = []
    for start in range(0, len(prefixes), rows):
        chosen = list(itertools.islice(itertools.cycle(prefixes), start, start + rows))
        new = []
        for slot, prefix in enumerate(chosen):
            new.append(driver.new(slot, prefix, GREEDY))
            if len(prefix) > 1:
                driver.step(new, [driver.row(slot, len(prefix) - 1, sample=False)])
                new = []
        result = driver.step(new, [driver.row(slot, 1, sample=True) for slot in range(rows)])
        found += [sampled.logprob for sampled in result.sampled if sampled.logprob is not None]
    return found
