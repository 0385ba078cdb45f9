"""From a configuration to a Runner on several GPUs."""

from __future__ import annotations

import atexit

from moeserve.config import ServerConfig
from moeserve.errors import ConfigError
from moeserve.models.loading.progress import OnProgress
from moeserve.models.sources.source import ModelSource
from moeserve.worker.gpu_loading import gpu_constraints, load_gpu_engine
from moeserve.worker.group.leader import LeaderGroup, LeaderRunner
from moeserve.worker.runner import Runner


def load_group_runner(
    config: ServerConfig,
    source: ModelSource,
    on_progress: OnProgress,
    numbers: list[int],
    forced_rows: int = 0,
) -> Runner:
    """As `load_gpu_runner`, divided among these GPUs. The followers' processes end with this one, or before."""
    refuse_placement_flags(config)
    if forced_rows:
        raise ConfigError("--routing-trace: for one GPU; leave it out, or --gpus")
    return lead(config, source, on_progress, LeaderGroup(config, numbers, len(numbers)))


def lead(
    config: ServerConfig, source: ModelSource, on_progress: OnProgress, group: LeaderGroup
) -> LeaderRunner:
    """Loads the leader's share while the followers load theirs."""
    atexit.register(group.close)
    try:
        group.use_device()
        constraints = gpu_constraints(config, source)
        loaded = load_gpu_engine(config, source, on_progress, group.device, ranks=group)
    except BaseException:
        group.close()
        raise
    return LeaderRunner(group, loaded.engine, loaded.ready, constraints, loaded.recorder)


def refuse_placement_flags(config: ServerConfig) -> None:
    """Raises ConfigError for those that leave a part of the model in RAM: with several GPUs all of it is divided among
    them."""
    flags = {
        "--num-gpu-experts": config.num_gpu_experts,
        "--n-gpu-layers": config.n_gpu_layers,
        "--placement-rules": config.placement_rules,
        "--gpu-prefill-token-threshold": config.gpu_prefill_token_threshold,
        "--max-deferred-experts-per-token": config.max_deferred_experts_per_token or None,
    }
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        raise ConfigError(
            f"{', '.join(given)}: with several GPUs the whole model is divided among their memories; leave it out, or "
            "use one GPU"
        )
