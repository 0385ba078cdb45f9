"""What comes back from RAM or from disk to a GPU is what was there: the real engine, streams and pinned memory."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from moeserve.worker.loading.load import load_runner
from tests.conftest import OWN_FIXTURES
from tests.gpu.driver import small_config
from tests.support.worker.real_time_world import RealTimeWorld

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROMPT = 7 * 32 + 1  # tokens: whole pages, and one that is computed


@pytest.mark.parametrize("tier", ["ram", "disk", "both"])
@pytest.mark.parametrize("name", ["tiny-q4_k_m.gguf", "tiny-qwen3next-q4_k_m.gguf"])
def test_answers_are_those_of_prompts_in_the_pool(
    tier: str, name: str, tiny_model: Path, tmp_path: Path
) -> None:
    """Each prompt is asked for twice, and again when others have taken its place. The second time all pages come from
    the pool, the third from a tier: the same rows are computed behind the same KV, in other slots. Of a recurrent
    model, a few rows more are computed, which may round differently."""
    is_recurrent = "next" in name
    config = small_config(
        OWN_FIXTURES / name if is_recurrent else tiny_model,
        device="cuda",
        max_num_seqs=4,
        kv_ram=0.0 if tier == "disk" else 0.25,
        kv_disk=None if tier == "ram" else str(tmp_path / "tier"),
    )
    runner = load_runner(config, lambda *_: None)
    assert runner.ready().kv_tiers == (["ram", "disk"] if tier == "both" else [tier])
    # Steps are told as long, so that these prompts, which take no time, are not computed instead.
    world = RealTimeWorld(runner, lambda _: 1000.0, num_kv_slots=600)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, 600) for _ in range(PROMPT)] for _ in range(5)]
    for number, prompt in enumerate(prompts):
        for again in (0, 100):
            world.ask(again + number, prompt, 24)
            world.finish()
    for number, prompt in enumerate(prompts):
        world.ask(200 + number, prompt, 24)
        world.finish()
    answers = {id: seen.tokens for id, seen in world.seen.items()}
    same = sum(answers[200 + number] == answers[100 + number] for number in range(len(prompts)))
    report = world.scheduler.load_report()
    found = report.disk if tier == "disk" else report.ram
    print(f"KV TIERS {tier} {name}: {same} of {len(prompts)} answers the same; {found}")
    assert same >= len(prompts) - is_recurrent
    assert found.tokens >= 3 * (PROMPT // 32 - 1) * 32
    assert found.failed_pages == 0
    world.check_all_free()
