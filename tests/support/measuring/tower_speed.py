"""A program that measures a vision tower on a GPU: the time of whole pictures, and of the kernels of the largest.

    python -m tests.support.measuring.tower_speed

The tower has Qwen3.6's shape and random weights. For each picture: milliseconds with layers by torch and by fused
kernels in turns (medians), the first picture of its size, and the distance from the same tower in float32.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.load import make_tower
from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower
from moeserve.visualserver.towers.tower import Pixels
from moeserve.visualserver.towers.weights import InputFormat
from tests.support.pictures.picture_fixture import errors
from tests.support.pictures.random_tower import QWEN36, write_random_tower

GPU = torch.device("cuda", 0)
ROUNDS = 10
# Rows and columns of tokens.
SIZES = {256: (16, 16), 1024: (32, 32), 4048: (44, 92)}


def picture(tokens: int) -> Pixels:
    rows, columns = SIZES[tokens]
    side = QWEN36.token_side
    return np.random.default_rng(tokens).integers(0, 256, (rows * side, columns * side, 3), np.uint8)


def milliseconds(tower: Qwen3VlTower, pixels: Pixels) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    tower.encode(pixels)
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file, shape = open_tower(write_random_tower(Path(folder) / "mmproj.gguf", QWEN36))
        fused, plain = (make_tower(file, shape, GPU) for _ in range(2))
        exact = make_tower(file, shape, GPU, InputFormat.FLOAT32)
        assert isinstance(fused, Qwen3VlTower)
        assert isinstance(plain, Qwen3VlTower)
        assert isinstance(exact, Qwen3VlTower)
        plain._fused = None
        for tokens in SIZES:
            pixels = picture(tokens)
            truth = exact.encode(pixels)
            first = {name: milliseconds(each, pixels) for name, each in (("fused", fused), ("torch", plain))}
            times: dict[str, list[float]] = {"fused": [], "torch": []}
            for _ in range(ROUNDS):
                for name, tower in (("torch", plain), ("fused", fused)):
                    times[name].append(milliseconds(tower, pixels))
            for name, tower in (("torch", plain), ("fused", fused)):
                error = float(np.median(errors(tower.encode(pixels), truth)))
                print(
                    f"{tokens} tokens, {name}: {statistics.median(times[name]):.1f} ms "
                    f"({min(times[name]):.1f} to {max(times[name]):.1f}), the first {first[name]:.0f}, "
                    f"median relative error {error:.2e}",
                    flush=True,
                )
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            fused.encode(picture(max(SIZES)))
        print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=16, max_name_column_width=60))


if __name__ == "__main__":
    main()
