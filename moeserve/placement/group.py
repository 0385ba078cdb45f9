"""Places one rank's share of a model that several GPUs divide: in its GPU memory and, for experts, in RAM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from moeserve.config import ServerConfig
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.models.interface import ModelShape
from moeserve.models.ranks.rank_share import RankShare, share_of, stage_of, why_undivided
from moeserve.models.sources.gguf import TensorInfo
from moeserve.placement.gpu import Gpu
from moeserve.placement.options import share_options, with_expert_cache, with_state_slots
from moeserve.placement.place import place
from moeserve.placement.placement import Placement
from moeserve.placement.sizes import Bytes, ModelSizes
from moeserve.placement.unpacked import given_gib


def share_among(
    config: ServerConfig,
    shape: ModelShape,
    tensors: Mapping[str, TensorInfo],
    rank: int,
    num_ranks: int,
    counts: Sequence[Sequence[int]] | None,
) -> RankShare:
    """Returns the share of the model that `rank`, of `num_ranks` GPUs, holds and computes. tensors: the model's, by
    name. config: its --parallel must be resolved, not "auto". counts: [layers][experts], tokens routed to each expert.
    Raises ConfigError if the model cannot be divided in this way."""
    try:
        if config.parallel == "layers":
            return stage_of(shape, tensors, rank, num_ranks)
        return share_of(shape, tensors, rank, num_ranks, counts)
    except ValueError as error:
        remedy = "choose fewer GPUs"
        if config.parallel == "tensor":
            remedy += ", or --parallel layers"
        elif not why_undivided(shape, num_ranks):
            remedy += ", or --parallel tensor"
        raise ConfigError(f"--gpus {config.gpus}: {error}; {remedy}") from error


def share_sizes(sizes: ModelSizes, share: RankShare) -> ModelSizes:
    """Returns the sizes of a rank's share. sizes: the sizes by the share's model shape, with all experts of the
    model."""
    own = sizes.with_experts([len(ids) for ids in share.experts])
    if share.is_stage and share.rank:
        return replace(own, embedding=Bytes(0, 0), head=Bytes(0, 0))
    return own


def place_share(
    config: ServerConfig,
    sizes: ModelSizes,
    shape: ModelShape,
    gpu: Gpu,
    share: RankShare,
    counts: Sequence[Sequence[int]] | None,
    ram: int,
) -> Placement:
    """Returns the placement of a rank's share on its GPU: which weights are in GPU memory, which in RAM. sizes: from
    `share_sizes`. counts: [layers][experts] of the whole model, tokens routed to each expert. ram: bytes of RAM for all
    ranks together. Expert ids in the result are indices into `share.experts`.

    Experts of undivided layers may be cached on the GPU, as on a single GPU; experts of divided layers do not move.
    Raises ConfigError if the dense parts do not fit.
    """
    of_share = None if counts is None else share.counts_of(counts)
    options = with_state_slots(share_options(config, shape, of_share), config, sizes, gpu)
    placement = place(sizes, options, gpu if share.is_stage else replace(gpu, can_stream=False))
    if placement.begins_in_ram:
        budget = gpu.free_bytes if options.gpu_memory_budget is None else options.gpu_memory_budget
        raise ConfigError(
            f"--gpus: the weights of this GPU's share, without experts, do not fit in {budget / GIB:.2f} GiB, and with "
            "several GPUs only experts may be in RAM; use more GPUs, a smaller --max-model-len or fewer --max-num-seqs"
        )
    if not share.is_stage:
        return placement
    return with_expert_cache(placement, sizes, config, ram // share.num_ranks)


_OF_ONE_GPU = {
    "--n-gpu-layers",
    "--placement-rules",
    "--unpacked-experts",
}  # neither way of dividing has them


def refuse_placement_flags(config: ServerConfig) -> None:
    """Raises ConfigError for placement flags that do not apply when several GPUs divide a model in this way."""
    flags: dict[str, object] = {
        "--n-gpu-layers": config.n_gpu_layers,
        "--placement-rules": config.placement_rules,
        "--unpacked-experts": given_gib(config) or None,
        "--debug-dump": config.debug_dump if config.parallel == "layers" else None,
        "--record-routing-trace": config.record_routing_trace if config.parallel == "layers" else None,
    }
    if config.parallel != "layers":
        flags["--gpu-prefill-token-threshold"] = config.gpu_prefill_token_threshold
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        other = " --parallel " + ("tensor" if config.parallel == "layers" else "layers")
        raise ConfigError(
            f"{', '.join(given)}: not with several GPUs and --parallel {config.parallel}; leave it out, or use one GPU"
            + (f", or{other}" if not _OF_ONE_GPU.intersection(given) else "")
        )
