"""When a picture's size on a GPU takes cuDNN's attention, which needs a plan for each new size."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from torch.nn.attention import SDPBackend

from moeserve.visualserver.towers.attention_backend import MOST_SIZES, PLAN_MS, AttentionBackend
from tests.support.pictures.random_tower import QWEN36


def backend() -> AttentionBackend:
    return AttentionBackend(QWEN36.layers, QWEN36.hidden)


def is_cudnn(of: AttentionBackend, patches: int) -> bool:
    first, *others = of.order(patches)
    assert {SDPBackend.FLASH_ATTENTION, SDPBackend.MATH} <= {first, *others}
    return first is SDPBackend.CUDNN_ATTENTION


def test_large_pictures_at_once_small_ones_later() -> None:
    found = backend()
    assert is_cudnn(found, 16_192)
    assert not any(is_cudnn(found, 1024) for _ in range(100))
    medium = [is_cudnn(found, 4096) for _ in range(20)]
    assert medium == [False] * 13 + [True] * 7


@pytest.mark.parametrize("seed", range(3))
def test_no_more_than_twice_the_best_choice(seed: int) -> None:
    """For any sequence of sizes: of the time that is lost to plans and to the slower kernel."""
    rng, found = np.random.default_rng(seed), backend()
    sizes = rng.choice([256, 1024, 4096, 8192, 16384], 400, p=[0.2, 0.2, 0.3, 0.2, 0.1])
    lost, planned = 0.0, set()
    gain = {int(size): 51.3 * (size / 16_192) ** 2 for size in set(sizes)}  # ms of 27 layers
    for size in map(int, sizes):
        if is_cudnn(found, size):
            lost += PLAN_MS * (size not in planned)
            planned.add(size)
        else:
            lost += gain[size]
    best = sum(min(PLAN_MS, gain[size] * count) for size, count in Counter(map(int, sizes)).items())
    assert 0.0 < lost <= 2.0 * best


def test_plans_are_bounded() -> None:
    found = backend()
    assert sum(is_cudnn(found, 16_000 + size) for size in range(100)) == MOST_SIZES
    assert is_cudnn(found, 16_000)
