"""Chooses the tower's device and loads the tower there."""

from __future__ import annotations

import logging

import torch

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.sources.source import TensorSource
from moeserve.visualserver.shapes.gemma3 import Gemma3Shape
from moeserve.visualserver.shapes.gemma4 import Gemma4Shape
from moeserve.visualserver.shapes.glm4v import GlmShape
from moeserve.visualserver.shapes.kimi_k25 import KimiShape
from moeserve.visualserver.shapes.llama_4 import LlamaShape
from moeserve.visualserver.shapes.minimax_m3 import MiniMaxShape
from moeserve.visualserver.shapes.qwen3vl import Qwen3VlShape
from moeserve.visualserver.tower_file import AnyTowerShape
from moeserve.visualserver.tower_memory import takes_block_float, takes_gpu
from moeserve.visualserver.towers.gemma3 import Gemma3Tower
from moeserve.visualserver.towers.gemma4 import Gemma4Tower
from moeserve.visualserver.towers.glm4v import GlmTower
from moeserve.visualserver.towers.kimi_k25 import KimiTower
from moeserve.visualserver.towers.llama_4 import LlamaTower
from moeserve.visualserver.towers.minimax_m3 import MiniMaxTower
from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower
from moeserve.visualserver.towers.tower import CPU, Tower, TowerMemoryError
from moeserve.visualserver.towers.weights import InputFormat
from moeserve.worker.loading.device import choose_device, gpu_obstacle, is_divided

GPU = torch.device("cuda", 0)  # the worker's GPU, if it has one

log = logging.getLogger(__name__)


def load_tower(config: ServerConfig, file: TensorSource, shape: AnyTowerShape) -> tuple[Tower, int]:
    """Loads the tower and returns it after it has encoded its first picture, with the bytes of GPU memory that this
    process holds then (0 on the CPU). Raises ModelError, and UserError if --mmproj-device names a device that cannot be
    used."""
    tokens = config.image_max_tokens or shape.default_max_tokens
    device = _device(config, shape)
    if device.type == "cuda":
        try:
            return _warm_tower(file, shape, device, tokens, None)
        except TowerMemoryError as error:
            if config.mmproj_device != "auto":
                raise
            log.warning("the vision tower computes on the CPU: %s", error)
        torch.cuda.empty_cache()
    inputs = InputFormat.BLOCK_FLOAT if takes_block_float(config.isa) else InputFormat.FLOAT32
    return _warm_tower(file, shape, CPU, tokens, inputs)


def _warm_tower(
    file: TensorSource, shape: AnyTowerShape, device: torch.device, tokens: int, inputs: InputFormat | None
) -> tuple[Tower, int]:
    try:
        tower = make_tower(file, shape, device, inputs)
    except torch.cuda.OutOfMemoryError as error:
        raise TowerMemoryError from error
    return tower, tower.warm(tokens)


def make_tower(
    file: TensorSource, shape: AnyTowerShape, device: torch.device = CPU, inputs: InputFormat | None = None
) -> Tower:
    """Returns the tower with its weights loaded to the device. inputs: see `Tower`. Raises ModelError if a tensor is
    missing or unsupported."""
    match shape:
        case Gemma3Shape():
            return Gemma3Tower(file, shape, device, inputs)
        case Gemma4Shape():
            return Gemma4Tower(file, shape, device, inputs)
        case GlmShape():
            return GlmTower(file, shape, device, inputs)
        case KimiShape():
            return KimiTower(file, shape, device, inputs)
        case LlamaShape():
            return LlamaTower(file, shape, device, inputs)
        case MiniMaxShape():
            return MiniMaxTower(file, shape, device, inputs)
        case Qwen3VlShape():
            return Qwen3VlTower(file, shape, device, inputs)


def _device(config: ServerConfig, shape: AnyTowerShape) -> torch.device:
    """Chooses the device of --mmproj-device. Raises ConfigError if the tower cannot run there."""
    if config.mmproj_device == "cpu":
        return CPU
    if config.mmproj_device == "cuda":
        if is_divided(config) or config.worker is not None:
            raise ConfigError(
                "--mmproj-device cuda: several GPUs and remote workers see no pictures; leave --mmproj out, too"
            )
        if (obstacle := gpu_obstacle()) is not None:
            raise ConfigError(f"--mmproj-device cuda: {obstacle.text}; or say --mmproj-device cpu")
        return GPU
    if config.worker is not None or is_divided(config) or choose_device(config.device) == "cpu":
        return CPU
    return GPU if takes_gpu(config, shape, torch.cuda.mem_get_info(GPU)[1]) else CPU
