"""Loads a Runner for several GPUs from a configuration."""

from __future__ import annotations

import atexit

from moeserve.config import ServerConfig, num_drafts
from moeserve.errors import ConfigError
from moeserve.models.loading.progress import OnProgress
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import ModelSource
from moeserve.placement.group import refuse_placement_flags
from moeserve.worker.group.leader import LeaderGroup, LeaderRunner
from moeserve.worker.group.shares import with_parallel
from moeserve.worker.loading.gpu.load import gpu_constraints, load_gpu_engine
from moeserve.worker.loading.start import Start
from moeserve.worker.runner import Runner


def load_group_runner(
    config: ServerConfig,
    source: ModelSource,
    on_progress: OnProgress,
    numbers: list[int],
    start: Start,
    forced_rows: int = 0,
) -> Runner:
    """Loads and returns a runner as `load_gpu_runner` does, with the model divided among the GPUs `numbers`. Raises
    ConfigError also for flags that need a single GPU. The follower processes end with this process or before."""
    if forced_rows:
        raise ConfigError("--routing-trace: works with one GPU only; leave it out, or leave --gpus out")
    if num_drafts(config):
        raise ConfigError(
            "--speculative-config and --speculative-model work with one GPU only so far; leave them out, or leave "
            "--gpus out"
        )
    config = with_parallel(config, read_checked_shape(source), numbers)
    refuse_placement_flags(config)
    return lead(config, source, on_progress, LeaderGroup(config, numbers, len(numbers)), start)


def lead(
    config: ServerConfig,
    source: ModelSource,
    on_progress: OnProgress,
    group: LeaderGroup,
    start: Start,
) -> LeaderRunner:
    """Loads the leader's share while the followers load theirs."""
    atexit.register(group.close)
    try:
        group.use_device()
        constraints = gpu_constraints(config, source)
        loaded = load_gpu_engine(config, source, on_progress, group.device, start, ranks=group)
    except BaseException:
        group.close()
        raise
    return LeaderRunner(group, loaded.engine, loaded.ready, constraints, loaded.recorder)
