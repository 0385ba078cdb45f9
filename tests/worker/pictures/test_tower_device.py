"""Where --mmproj-device puts the tower. Without a GPU: what is refused, and what falls back to the CPU."""

from __future__ import annotations

import logging

import pytest
import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kernels import block_float
from moeserve.kernels.block_float import has_block_float
from moeserve.visualserver.tower_file import open_tower
from moeserve.visualserver.tower_memory import gpu_bytes, takes_block_float, takes_gpu
from moeserve.visualserver.towers import load
from moeserve.visualserver.towers.load import load_tower
from moeserve.visualserver.towers.tower import CPU, Tower, TowerMemoryError
from moeserve.visualserver.towers.weights import InputFormat
from tests.support.pictures.picture_fixture import MODEL, TOWER
from tests.support.pictures.random_tower import QWEN36

GIB = 1 << 30


def config_of(**options: object) -> ServerConfig:
    return ServerConfig(**{"model": str(MODEL), "mmproj": str(TOWER)} | options)  # type: ignore[arg-type]


def test_auto_takes_an_eighth_at_most() -> None:
    """Qwen3.6's tower with a picture of 4,096 tokens, on GPUs of 16 and of 24 GiB."""
    assert 2.3 * GIB < gpu_bytes(QWEN36, 4096) < 2.6 * GIB
    sizes = [takes_gpu(config_of(), QWEN36, size) for size in (16 * GIB, 24 * GIB)]
    assert sizes == [False, True]
    assert takes_gpu(config_of(image_max_tokens=256), QWEN36, 16 * GIB)
    assert not takes_gpu(config_of(), QWEN36, None)
    assert takes_gpu(config_of(mmproj_device="cuda"), QWEN36, 8 * GIB)
    assert not takes_gpu(config_of(mmproj_device="cpu"), QWEN36, 80 * GIB)


def test_number_format_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Block floating point where the CPU has AVX-512 VNNI; --isa may name less."""
    by_isa = {
        "auto": True,
        "measure": True,
        "avx512_vnni": True,
        "avx512_vbmi": True,
        "avx2": False,
        "plain": False,
    }
    for has in (True, False):
        monkeypatch.setattr(block_float, "has_block_float", lambda has=has: has)
        found = {isa: takes_block_float(isa) for isa in by_isa}
        assert found == (by_isa if has else dict.fromkeys(by_isa, False))
        for isa in by_isa if has_block_float() else ():
            tower, _ = load_tower(config_of(isa=isa, mmproj_device="cpu"), *open_tower(TOWER))
            assert tower.weights.is_block_float == found[isa]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    for options in ({}, {"device": "cpu"}, {"mmproj_device": "cpu"}, {"gpus": "2"}):
        tower, gpu_memory = load_tower(config_of(**options), *open_tower(TOWER))
        assert (tower.device, gpu_memory) == (CPU, 0)
    with pytest.raises(ConfigError, match=r"--mmproj-device cuda: .*; or say --mmproj-device cpu"):
        load_tower(config_of(mmproj_device="cuda"), *open_tower(TOWER))
    with pytest.raises(ConfigError, match="several GPUs and remote workers see no pictures"):
        load_tower(config_of(mmproj_device="cuda", gpus="2"), *open_tower(TOWER))


def test_a_full_gpu(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """`auto` then takes the CPU and says so, `cuda` ends the start."""
    make = load.make_tower

    def full(file: object, shape: object, device: torch.device, inputs: InputFormat | None) -> Tower:
        if device.type == "cuda":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return make(file, shape, device, inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(load, "make_tower", full)
    monkeypatch.setattr(load, "_device", lambda *_: torch.device("cuda", 0))
    with caplog.at_level(logging.WARNING):
        tower, gpu_memory = load_tower(config_of(), *open_tower(TOWER))
    assert (tower.device, gpu_memory) == (CPU, 0)
    assert "the vision tower computes on the CPU: the GPU's memory does not suffice" in caplog.text
    with pytest.raises(TowerMemoryError):
        load_tower(config_of(mmproj_device="cuda"), *open_tower(TOWER))
