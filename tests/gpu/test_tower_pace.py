"""The pace of a tower on a GPU that another process computes on, too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.processes.tower_page import TowerPage
from moeserve.visualserver.encoding_pace import EncodingPace
from moeserve.visualserver.slices import Slices
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.towers.load import make_tower
from moeserve.visualserver.towers.tower import Tower
from tests.support.measuring.gpu_neighbour import Neighbour
from tests.support.pictures.random_tower import QWEN36, write_random_tower

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
SECONDS = 3.0
PIXELS = np.random.default_rng(3).integers(0, 256, (1024, 1024, 3), np.uint8)  # 1,024 tokens


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Tower:
    path = write_random_tower(tmp_path_factory.mktemp("tower") / "mmproj.gguf", QWEN36)
    found = make_tower(*open_tower(path), torch.device("cuda", 0))
    found.encode(PIXELS)
    return found


@pytest.fixture
def neighbour() -> Iterator[Neighbour]:
    found = Neighbour()
    yield found
    found.close()


def test_a_neighbour_keeps_nine_tenths(tower: Tower, neighbour: Neighbour, tmp_path: Path) -> None:
    """Beside pictures without a pause. In turns, the median of three."""
    page = TowerPage(tmp_path / "page")
    page.open_requests = 1
    slices, kept = Slices(EncodingPace(0.1), page, tower), []
    for _ in range(3):
        neighbour.begin(SECONDS)
        alone = len(neighbour.step_ms())
        neighbour.begin(SECONDS)
        end, pictures = time.monotonic() + SECONDS, 0
        while time.monotonic() < end:
            with slices.picture():
                tower.encode(PIXELS, slices.ended)
            pictures += 1
        kept.append(len(neighbour.step_ms()) / alone)
        assert pictures >= 2
    print(f"kept {kept}")
    assert statistics.median(kept) >= 0.9


def test_slices_cost_a_picture_alone_little(tower: Tower, tmp_path: Path) -> None:
    """In turns, medians of ten."""
    slices = Slices(EncodingPace(0.1), TowerPage(tmp_path / "page"), tower)
    times: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(20):
        began = time.monotonic()
        if turn % 2:
            with slices.picture():
                tower.encode(PIXELS, slices.ended)
        else:
            tower.encode(PIXELS)
        times[bool(turn % 2)].append(time.monotonic() - began)
    sliced, whole = (statistics.median(times[is_sliced]) for is_sliced in (True, False))
    print(f"{sliced * 1e3:.1f} ms in slices, {whole * 1e3:.1f} ms without")
    assert sliced < 1.25 * whole
