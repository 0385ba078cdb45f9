"""`python -m moeserve.visualserver`: the visual server's process, started by the launcher where there is a tower."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Final

from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.codec import TO_VISUALSERVER
from moeserve.models.errors import ModelError
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.imports_without_gc import imports_without_gc
from moeserve.processes.lifecycle import Process, run_process
from moeserve.visualserver.embedding_cache import EmbeddingCache
from moeserve.visualserver.encoder import PictureEncoder, Tower
from moeserve.visualserver.manager import serve
from moeserve.visualserver.picture_decoder import PictureDecoder
from moeserve.visualserver.picture_size import SizeRule
from moeserve.visualserver.shapes.gemma4 import Gemma4Shape
from moeserve.visualserver.tower_file import AnyTowerShape, open_tower

NICENESS: Final = 5  # the worker's threads, whose steps all answers wait for, come first

log = logging.getLogger(__name__)


def main(process: Process) -> None:
    config = process.config
    inbox = PullChannel(process.context, process.paths.visualserver, TO_VISUALSERVER)
    to_http = PushChannel(process.context, process.paths.http)
    assert config.mmproj is not None, "the launcher starts this process where there is a tower"
    tower, shape = _load(Path(config.mmproj), Path(config.model))
    os.nice(NICENESS)
    decoder = PictureDecoder()
    decoder.start()

    def rule(max_tokens: int | None) -> SizeRule:
        most = config.image_max_tokens
        bounds = [each for each in (most, max_tokens) if each is not None]
        return shape.size_rule(config.image_min_tokens, min(bounds, default=None))

    rule(None)  # a flag that the tower does not take is refused at the start
    cache = EmbeddingCache(int(config.image_cache * GIB))
    encoder = PictureEncoder(tower, decoder, rule, cache, EmbeddingFiles(process.paths.spans))
    process.ready()
    try:
        serve(encoder, inbox, to_http, process.heartbeat)
    finally:
        decoder.close()


def _load(path: Path, model: Path) -> tuple[Tower, AnyTowerShape]:
    """Raises ModelError, ConfigError."""
    began = time.monotonic()
    file, shape = open_tower(path)
    text = read_checked_shape(open_metadata(model))
    if not shape.fits(text):
        raise ConfigError(
            f"--mmproj: {path.name} has another family's tower than {text.architecture}; name the model's own file, or "
            "leave it out"
        )
    if text.embedding_size != shape.embedding_size:
        raise ModelError(
            path,
            f"gives embeddings of {shape.embedding_size} numbers, the model takes {text.embedding_size}; name its own "
            "mmproj file",
        )
    # OpenMP's threads would spin between products, on cores that the worker's need: 10% of the tower's CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with imports_without_gc():
        import torch

        from moeserve.visualserver.towers.gemma4 import Gemma4Tower
        from moeserve.visualserver.towers.qwen3vl import Qwen3VlTower
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    tower = Gemma4Tower(file, shape) if isinstance(shape, Gemma4Shape) else Qwen3VlTower(file, shape)
    tower.warm()
    log.info("the tower of %s is ready after %.1f s", path.name, time.monotonic() - began)
    return tower, shape


if __name__ == "__main__":
    run_process("visualserver", main)
