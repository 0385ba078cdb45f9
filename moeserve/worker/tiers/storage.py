"""Sets up the tiers behind the KV pool in the worker, from the flags to the threads that move pages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moeserve.config import ServerConfig
from moeserve.config.units import GIB, MIB
from moeserve.errors import ConfigError
from moeserve.kernels.stream_operands import KvLayer, StateLayer
from moeserve.kv.cache_pages import CachePages, kv_blocks, kv_tensors, state_tensors
from moeserve.kv.device_pages import DevicePages, Staging
from moeserve.kv.disk.directory import DiskDirectory
from moeserve.kv.disk.fingerprint import KV_VERSION, Fingerprint
from moeserve.kv.disk.store import DEFAULT_GIB, PageStore
from moeserve.kv.host_blocks import HostBlocks
from moeserve.kv.layout import KvLayout
from moeserve.kv.ram_store import RamStore
from moeserve.kv.tier_sizes import default_ram_bytes
from moeserve.messages.pages import WRITES_UNDER_WAY
from moeserve.models.sources.source import ModelSource
from moeserve.processes.free_memory import limit_note
from moeserve.worker.tiers.model_hash import model_hash
from moeserve.worker.tiers.page_mover import PageMover, Tiers

PAGE_TOKENS = 32
# WorkerReady.kv_write_bytes for a CPU, which copies pages itself, and for a GPU, which needs 50 us to read them.
CPU_WRITE_BYTES = 8 * MIB
GPU_WRITE_BYTES = 64 * MIB

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PageTiersPlan:
    """A claimed disk folder, a RAM tier, or both, with the identity of their pages. `open` it in the process that
    serves."""

    directory: DiskDirectory | None
    disk_bytes: int
    ram_bytes: int  # 0: no RAM tier
    model: str
    model_hash: str
    architecture: str
    kv_dtype: str
    engine: str

    def open(
        self,
        layers: Sequence[KvLayer],
        states: Sequence[StateLayer],
        device: torch.device | None = None,
        *,
        pin_after_s: float = 0.0,
    ) -> PageMover:
        """Opens the tiers, and returns what copies pages between them and the KV pool. layers: the KV pool's layers;
        states: empty if the model has no recurrent state. device: of both; None: RAM. pin_after_s: delay before the RAM
        tier allocates its memory, which blocks the GPU's launches. Raises ConfigError if the folder cannot be read."""
        tensors, of_states = kv_tensors(layers), state_tensors(states, layers)
        state_pages: CachePages | None = None
        if device is None:
            pages = CachePages(tensors, PAGE_TOKENS, kv_blocks(layers))
            state_pages = CachePages(of_states, 1) if of_states else None
        else:
            state_bytes = CachePages(of_states, 1).page_bytes if of_states else 0
            page_bytes = CachePages(tensors, PAGE_TOKENS).page_bytes
            staging = Staging(device, max(page_bytes, state_bytes))
            pages = of_kv = DevicePages(tensors, PAGE_TOKENS, staging)
            of_kv.compile()
            state_pages = DevicePages(of_states, 1, staging) if of_states else None
        is_gpu = device is not None and device.type == "cuda"
        write_bytes = GPU_WRITE_BYTES if is_gpu else CPU_WRITE_BYTES
        state_bytes = 0 if state_pages is None else state_pages.page_bytes
        # Memory is allocated in blocks of one page. Beyond the pages counted, one state and one page may be in
        # progress.
        buffered = WRITES_UNDER_WAY * write_bytes + state_bytes + 2 * pages.page_bytes
        blocks = HostBlocks(pages.page_bytes, self.ram_bytes or buffered, pinned=is_gpu)
        blocks.grow()
        ram = RamStore(blocks) if self.ram_bytes else None
        if ram is not None and is_gpu:
            grow_all_after(blocks, pin_after_s)
        if ram is not None:
            log.info(
                "the RAM tier has room for %d tokens of KV, %.2f GiB",
                ram.max_bytes // pages.page_bytes * PAGE_TOKENS,
                ram.max_bytes / GIB,
            )
        tiers = Tiers(blocks, ram, self._open_disk(pages.page_bytes, state_bytes))
        return PageMover(pages, tiers, write_bytes, state_pages)

    def _open_disk(self, page_bytes: int, state_bytes: int) -> PageStore | None:
        if self.directory is None:
            return None
        started = time.perf_counter()
        fingerprint = Fingerprint(
            kv_version=KV_VERSION,
            model=self.model,
            model_hash=self.model_hash,
            architecture=self.architecture,
            kv_dtype=self.kv_dtype,
            engine=self.engine,
            page_tokens=PAGE_TOKENS,
            page_bytes=page_bytes,
        )
        kinds = [fingerprint]
        if state_bytes:
            kinds.append(replace(fingerprint, page_tokens=0, page_bytes=state_bytes))
        try:
            store = PageStore(self.directory.path, self.disk_bytes, kinds)
        except OSError as error:
            raise ConfigError(
                f"--kv-disk {self.directory.path}: the folder cannot be used: {error}; name another"
            ) from error
        log.info(
            "the disk tier in %s has %d pages of %d tokens, %.2f of %.2f GiB, opened in %.0f ms",
            *(self.directory.path, len(store), PAGE_TOKENS),
            *(store.num_bytes / GIB, self.disk_bytes / GIB, (time.perf_counter() - started) * 1e3),
        )
        return store


def grow_all_after(blocks: HostBlocks, seconds: float) -> None:
    """Calls `grow_all` on a thread after a delay; until then memory is allocated as needed."""
    pinning = threading.Timer(seconds, blocks.grow_all)
    pinning.name, pinning.daemon = "kv-pin", True
    pinning.start()


def claim_directory(config: ServerConfig) -> DiskDirectory | None:
    """Locks the folder of --kv-disk before the model is loaded. Raises ConfigError, also for an invalid --kv-ram."""
    if config.kv_ram and config.prefix_cache == "off":
        raise ConfigError(
            "--kv-ram: is a part of the prefix cache, which --prefix-cache off switches off; leave one "
            "of them out"
        )
    if config.kv_disk is None:
        if config.kv_disk_gib is not None:
            raise ConfigError(
                "--kv-disk-gib: has no effect without --kv-disk; add --kv-disk, or leave --kv-disk-gib out"
            )
        return None
    if config.prefix_cache == "off":
        raise ConfigError(
            "--kv-disk: is a part of the prefix cache, which --prefix-cache off switches off; leave one "
            "of them out"
        )
    return DiskDirectory(Path(config.kv_disk))


def refuse_tiers(config: ServerConfig, where: str) -> None:
    """Raises ConfigError if the user asks for tiers where none are supported."""
    if config.kv_disk is not None or config.kv_disk_gib is not None:
        raise ConfigError(f"--kv-disk: there is no disk tier {where}; leave it out")
    if config.kv_ram:
        raise ConfigError(f"--kv-ram: there is no RAM tier {where}; leave it out")


def ram_tier_bytes(
    config: ServerConfig, pool_bytes: int, free_bytes: int, *, has_window_pool: bool = False
) -> int:
    """Returns the RAM tier's bytes by --kv-ram, beside a GPU's KV pool of `pool_bytes`. free_bytes: RAM left after
    the weights. Raises ConfigError if it does not suffice."""
    if config.kv_ram is None:
        chosen = default_ram_bytes(config, pool_bytes, free_bytes, has_window_pool=has_window_pool)
        if has_window_pool:
            log.info(
                "no tier of the prefix cache in RAM: windowed layers have a separate KV pool, and a tier keeps "
                "whole tokens; --kv-ram chooses a tier behind one pool"
            )
        elif not chosen and config.prefix_cache != "off":
            log.info(
                "no tier of the prefix cache in RAM: a quarter of the %.1f GiB that are free is less than the KV "
                "pool's %.1f GiB, whose pages it has, too (--kv-ram)",
                *(free_bytes / GIB, pool_bytes / GIB),
            )
        return chosen
    wanted = int(config.kv_ram * GIB)
    if wanted > free_bytes:
        raise ConfigError(
            f"--kv-ram {config.kv_ram:g}: {free_bytes / GIB:.1f} GiB of RAM are free after the weights{limit_note()}; "
            "lower it"
        )
    if 0 < wanted < pool_bytes:
        log.warning(
            "--kv-ram %g: has most of what the KV pool of %.1f GiB has, and little else",
            *(config.kv_ram, pool_bytes / GIB),
        )
    return wanted


def plan_tiers(
    config: ServerConfig,
    directory: DiskDirectory | None,
    ram_bytes: int,
    source: ModelSource,
    layout: KvLayout,
    engine: str,
) -> PageTiersPlan | None:
    """Returns the plan of the tiers; None if there is none. engine: identifies engines with equal rounding."""
    if directory is None and not ram_bytes:
        return None
    gib = DEFAULT_GIB if config.kv_disk_gib is None else config.kv_disk_gib
    return PageTiersPlan(
        directory,
        disk_bytes=int(gib * GIB),
        ram_bytes=ram_bytes,
        model=source.path.name,
        model_hash="" if directory is None else model_hash(source, dummy=config.load_format == "dummy"),
        architecture=source.architecture,
        kv_dtype=layout.dtype.name,
        engine=engine,
    )
