"""A GPU worker beside a vision tower on the same GPU: the tower has its memory first."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.worker.loading import tower_memory
from moeserve.worker.loading.tower_memory import beside_tower

CONFIG = ServerConfig(model="model.gguf", mmproj="mmproj.gguf", gpu_memory_budget=8.0)


def test_the_worker_waits_for_the_tower(tmp_path: Path) -> None:
    paths, found = RuntimePaths(tmp_path), list[ServerConfig]()
    waiting = threading.Thread(target=lambda: found.append(beside_tower(CONFIG, paths)))
    waiting.start()
    time.sleep(0.1)
    assert not found
    unnamed = tmp_path / "unnamed"  # as the visual server writes it: never half a number
    unnamed.write_text(str(2 << 30))
    unnamed.rename(paths.tower_memory)
    waiting.join(30)
    assert found == [replace(CONFIG, gpu_memory_budget=6.0)]
    # A worker that replaces a lost one counts the tower once.
    assert beside_tower(CONFIG, paths) == found[0]


def test_without_a_budget_what_is_free_counts(tmp_path: Path) -> None:
    paths, config = RuntimePaths(tmp_path), replace(CONFIG, gpu_memory_budget=None)
    paths.tower_memory.write_text(str(2 << 30))
    assert beside_tower(config, paths) == config


def test_a_tower_elsewhere_is_not_awaited(tmp_path: Path) -> None:
    for config in (replace(CONFIG, mmproj=None), replace(CONFIG, mmproj_device="cpu")):
        assert beside_tower(config, RuntimePaths(tmp_path)) == config


def test_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = RuntimePaths(tmp_path)
    monkeypatch.setattr(tower_memory, "DEADLINE_S", 0.05)
    with pytest.raises(ConfigError, match="was not loaded within"):
        beside_tower(CONFIG, paths)
    paths.tower_memory.write_text(str(8 << 30))
    with pytest.raises(ConfigError, match=r"the vision tower alone takes 8\.00 GiB; raise the budget"):
        beside_tower(CONFIG, paths)
