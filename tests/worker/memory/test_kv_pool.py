"""The KV pool's size where layers are in RAM and on a GPU: a token needs a slot in both."""

from __future__ import annotations

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kv.capacity import KvMemoryBudget, plan_capacity
from moeserve.kv.layout import KvLayout
from tests.support.models.model_header import QWEN3_30B_A3B

LAYOUT = KvLayout(QWEN3_30B_A3B)
LAYER = LAYOUT.layer_bytes(0)


def budgets(in_ram: int, on_gpu: int) -> list[KvMemoryBudget]:
    """Budgets for 48 layers, 8 of them in RAM. in_ram, on_gpu: tokens that there is room for; half of the RAM is the
    pool's."""
    return [
        KvMemoryBudget("GPU memory", 40 * LAYER * on_gpu, range(8, 48)),
        KvMemoryBudget("memory", 8 * LAYER * in_ram, range(8), share=0.5),
    ]


@pytest.mark.parametrize(("in_ram", "on_gpu", "slots"), [(10_000, 3000, 3000), (4000, 3000, 2000)])
def test_the_tighter_memory_counts(in_ram: int, on_gpu: int, slots: int) -> None:
    assert plan_capacity(ServerConfig(), LAYOUT, budgets(in_ram, on_gpu)).num_slots == slots


def test_what_the_user_asks_for_must_fit_both() -> None:
    config = ServerConfig(max_total_tokens=3500)
    assert plan_capacity(config, LAYOUT, budgets(4000, 4000)).num_slots == 3500
    for in_ram, on_gpu, most in ((3000, 4000, 1500), (8000, 3000, 3000)):
        with pytest.raises(ConfigError, match=f"--max-total-tokens 3500 .* at most {most}$"):
            plan_capacity(config, LAYOUT, budgets(in_ram, on_gpu))
    with pytest.raises(ConfigError, match="GiB of memory are free after the weights, room for 30 tokens"):
        plan_capacity(ServerConfig(), LAYOUT, budgets(60, 4000))
