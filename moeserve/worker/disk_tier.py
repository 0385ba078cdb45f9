"""The worker's part of the disk tier, from the flags to the threads that move pages."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.kv.cache_pages import CachePages, kv_tensors
from moeserve.kv.disk.directory import DiskDirectory
from moeserve.kv.disk.fingerprint import KV_VERSION, Fingerprint
from moeserve.kv.disk.store import DEFAULT_GIB, PageStore
from moeserve.kv.layout import KvLayout
from moeserve.models.sources.source import ModelSource
from moeserve.units import GIB
from moeserve.worker.model_hash import model_hash
from moeserve.worker.page_mover import PageMover

PAGE_TOKENS = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DiskTierPlan:
    """A claimed folder and whose pages it gets; open it in the process that serves."""

    directory: DiskDirectory
    budget_bytes: int
    model: str
    model_hash: str
    architecture: str
    kv_dtype: str
    engine: str

    def open(self, layers: Sequence[KvLayer], states: Sequence[StateLayer]) -> PageMover:
        """states: empty for a model that has none. Raises ConfigError where the folder cannot be read."""
        started = time.perf_counter()
        pages = CachePages(kv_tensors(layers), PAGE_TOKENS)
        of_states = CachePages([states[0].states], 1) if states else None
        fingerprint = Fingerprint(
            kv_version=KV_VERSION,
            model=self.model,
            model_hash=self.model_hash,
            architecture=self.architecture,
            kv_dtype=self.kv_dtype,
            engine=self.engine,
            page_tokens=PAGE_TOKENS,
            page_bytes=pages.page_bytes,
        )
        kinds = [fingerprint]
        if of_states is not None:
            kinds.append(replace(fingerprint, page_tokens=0, page_bytes=of_states.page_bytes))
        try:
            store = PageStore(self.directory.path, self.budget_bytes, kinds)
        except OSError as error:
            raise ConfigError(f"--kv-disk {self.directory.path}: {error}") from error
        log.info(
            "the disk tier in %s has %d pages of %d tokens, %.2f of %.2f GiB, opened in %.0f ms",
            *(self.directory.path, len(store), PAGE_TOKENS),
            *(store.num_bytes / GIB, self.budget_bytes / GIB, (time.perf_counter() - started) * 1e3),
        )
        return PageMover(pages, store, of_states)


def claim_directory(config: ServerConfig) -> DiskDirectory | None:
    """The folder of --kv-disk, before the model is loaded. Raises ConfigError."""
    if config.kv_disk is None:
        if config.kv_disk_gib is not None:
            raise ConfigError("--kv-disk-gib: has no effect without --kv-disk; add it, or leave this out")
        return None
    if config.prefix_cache == "off":
        raise ConfigError("--kv-disk: is a part of the prefix cache, which --prefix-cache off switches off")
    return DiskDirectory(Path(config.kv_disk))


def plan_disk_tier(
    config: ServerConfig,
    directory: DiskDirectory | None,
    source: ModelSource,
    layout: KvLayout,
    isa: str,
) -> DiskTierPlan | None:
    """None where there is no folder."""
    if directory is None:
        return None
    gib = DEFAULT_GIB if config.kv_disk_gib is None else config.kv_disk_gib
    return DiskTierPlan(
        directory,
        budget_bytes=int(gib * GIB),
        model=source.path.name,
        model_hash=model_hash(source, dummy=config.load_format == "dummy"),
        architecture=source.architecture,
        kv_dtype=layout.dtype.name,
        engine=f"cpu {isa} {config.weight_layout}",
    )
