"""`python -m moeserve.visualserver`: the visual server's process. The launcher starts it if there is a tower."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.messages.channels import PullChannel, PushChannel
from moeserve.messages.codec import TO_VISUALSERVER
from moeserve.models.errors import ModelError
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import TensorSource
from moeserve.processes.cpus import usable_cpus
from moeserve.processes.embedding_files import EmbeddingFiles
from moeserve.processes.imports_without_gc import imports_without_gc
from moeserve.processes.lifecycle import Process, run_process
from moeserve.processes.runtime_paths import RuntimePaths
from moeserve.processes.tower_page import TowerPage
from moeserve.visualserver.embedding_cache import EmbeddingCache
from moeserve.visualserver.encoder import PictureEncoder
from moeserve.visualserver.encoding_pace import EncodingPace
from moeserve.visualserver.manager import serve
from moeserve.visualserver.picture_bounds import PictureBounds
from moeserve.visualserver.picture_decoder import PictureDecoder
from moeserve.visualserver.slices import Slices
from moeserve.visualserver.tower_file import AnyTowerShape, open_tower
from moeserve.visualserver.video_decoder import VideoDecoder

if TYPE_CHECKING:
    from moeserve.visualserver.towers.tower import Tower

# Niceness of the encoding thread and of the threads that it starts. On a core that a worker's thread needs too, Linux
# gives the worker nine tenths of the time.
NICENESS: Final = 10

log = logging.getLogger(__name__)


def main(process: Process) -> None:
    config = process.config
    inbox = PullChannel(process.context, process.paths.visualserver, TO_VISUALSERVER)
    to_http = PushChannel(process.context, process.paths.http)
    assert config.mmproj is not None, "the launcher starts this process where there is a tower"
    file, shape = _open(Path(config.mmproj), Path(config.model))

    bounds = PictureBounds(shape, config.image_min_tokens, config.image_max_tokens)
    tower, gpu_memory = _load(config, file, shape)
    _tell_worker(process.paths, gpu_memory)
    os.nice(NICENESS)
    decoder = PictureDecoder()
    decoder.start()
    cache = EmbeddingCache(int(config.image_cache * GIB))
    slices = Slices(EncodingPace(config.image_share), TowerPage(process.paths.tower_page), tower)
    files = EmbeddingFiles(process.paths.spans)
    frame_rule = shape.frame_rule(config.video_max_tokens)
    videos = VideoDecoder(decoder)
    encoder = PictureEncoder(
        tower,
        decoder,
        bounds.rule,
        cache,
        files,
        slices,
        None if frame_rule is None else (videos, frame_rule),
    )
    process.ready()
    try:
        serve(encoder, inbox, to_http, process.heartbeat)
    finally:
        decoder.close()
        videos.close()


def _open(path: Path, model: Path) -> tuple[TensorSource, AnyTowerShape]:
    """Raises ModelError, ConfigError."""
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
    return file, shape


def _load(config: ServerConfig, file: TensorSource, shape: AnyTowerShape) -> tuple[Tower, int]:
    """Returns the tower, and the bytes of GPU memory that this process holds. Raises ModelError, ConfigError."""
    began = time.monotonic()
    # Otherwise OpenMP's threads would spin between products, on cores that the worker's threads need: 10% of the
    # tower's CPU time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Pictures differ in size. Without this setting, a freed block of one size could not serve a picture of another.
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    with imports_without_gc():
        import torch

        from moeserve.visualserver.towers.load import load_tower
    torch.set_num_threads(usable_cpus())
    tower, gpu_memory = load_tower(config, file, shape)
    where = "the CPU" if tower.device.type == "cpu" else f"the GPU, {gpu_memory / GIB:.2f} GiB"
    log.info("the tower of %s is ready on %s after %.1f s", file.path.name, where, time.monotonic() - began)
    return tower, gpu_memory


def _tell_worker(paths: RuntimePaths, gpu_memory: int) -> None:
    unnamed = paths.tower_memory.with_suffix(".new")
    unnamed.write_text(str(gpu_memory))
    unnamed.rename(paths.tower_memory)


if __name__ == "__main__":
    run_process("visualserver", main)
