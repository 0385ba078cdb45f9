"""`moeserve plan`: the command line, and the order in which the parts of a plan are computed. torch is imported only
when something is measured."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from moeserve.cli.command_line import flag_name, read_options, resolve
from moeserve.cli.other_flags import in_our_words
from moeserve.cli.plan.cache_forecast import (
    MOST_STREAMS,
    CacheForecast,
    can_fetch,
    forecast_cache,
    forecast_disk,
    trace_tokens,
)
from moeserve.cli.plan.disk_rate import DiskRate, measure_disk
from moeserve.cli.plan.fit import fit_model
from moeserve.cli.plan.memory import Memory, usable_gpu_bytes
from moeserve.cli.plan.options import SHARED, command_parser
from moeserve.cli.plan.rates import CpuRates, GpuRates
from moeserve.cli.plan.report import PlacementPlan, Speed, as_json, as_text
from moeserve.cli.plan.routing import RoutingProbabilities
from moeserve.cli.plan.several_gpus import GroupPlan, GroupSpeed, parallel_of, plan_group
from moeserve.cli.plan.several_gpus import as_json as group_json
from moeserve.cli.plan.several_gpus import as_text as group_text
from moeserve.cli.plan.several_models import SeveralModelsPlan, plan_several
from moeserve.cli.plan.several_models import as_json as several_json
from moeserve.cli.plan.several_models import as_text as several_text
from moeserve.cli.plan.speed import CpuSpeed, HybridSpeed
from moeserve.cli.plan.tiers import READ_BYTES_PER_S, disk_tier_bytes, forecast_tiers
from moeserve.config import ServerConfig, num_drafts
from moeserve.config.units import GIB
from moeserve.errors import ConfigError, UserError
from moeserve.models.gpu_features import gpu_shape
from moeserve.models.interface import ModelShape
from moeserve.models.open import open_metadata
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import GGUFFile
from moeserve.models.sources.source import ModelSource
from moeserve.placement import ModelSizes, Placement
from moeserve.placement.engine_memory import CUDA_CONTEXT_BYTES
from moeserve.placement.group import refuse_placement_flags
from moeserve.placement.options import heat_counts
from moeserve.placement.step_tokens import step_tokens
from moeserve.processes.free_memory import available_bytes, limit_note
from moeserve.worker.loading.device import choose_device, gpu_obstacle, parse_gpus

STREAMS = (1, 4, 16, 64)
PROMPTS = (512, 4096)
CONTEXT = 512
SHORT_STEP_S = 1e-3  # for shorter steps the server's work between two steps matters (measured on two cores)
ASSUMED_GPU = (
    "the GPU's speed is assumed where you have not given it (--gpu-bandwidth, --gpu-tflops, --pcie-bandwidth)"
)
ASSUMED_TEXT = (
    "the hits are those of a text that uses its experts again as published traces do; yours: record one with "
    "--record-routing-trace, and give it as --routing-trace"
)
USERS = (2048, 8192, 32768)  # tokens per user


def main(arguments: list[str]) -> int:
    """Returns the exit code: 0, or 2 with a message for bad arguments, a bad file, or a plan that cannot be made."""
    parser = command_parser()
    words, _ = in_our_words(arguments)
    named = list(itertools.takewhile(lambda word: not word.startswith("-"), words))
    if len(named) == 1:
        words.insert(0, "--model")
    args = parser.parse_args(words if len(named) < 2 else words[len(named) :])
    try:
        if len(named) > 1:
            several = several_plan(named, args)
            print(json.dumps(several_json(several), indent=2) if args.json else several_text(several))
            return 0
        config = resolve(read_options({name: getattr(args, name) for name in SHARED}, os.environ))
        if len(parse_gpus(config.gpus)) > 1:
            print(group_report(config, args))
            return 0
        plan = make_plan(config, args)
    except UserError as error:
        parser.error(str(error))
    print(json.dumps(as_json(plan), indent=2) if args.json else as_text(plan, verbose=args.verbose))
    return 0


def several_plan(named: Sequence[str], args: argparse.Namespace) -> SeveralModelsPlan:
    """Returns the plan of several models: which of those named before the flags fit beside each other. Raises UserError
    if --model is given too, or a model cannot be read."""
    if args.model is not None:
        raise ConfigError("--model names one model; name several before the flags")
    given = {name: getattr(args, name) for name in SHARED}
    configs = [resolve(read_options({**given, "model": name}, os.environ)) for name in named]
    gpu = _gpu_memory(configs[0], args)
    ram = available_bytes() if args.ram is None else int(args.ram * GIB)
    disk = READ_BYTES_PER_S if args.disk_bandwidth is None else args.disk_bandwidth * 1e9
    return plan_several(configs, ram, gpu or 0, disk)


def make_plan(config: ServerConfig, args: argparse.Namespace) -> PlacementPlan:
    """Plans the placement. Raises UserError for a file or a flag that cannot be served."""
    if config.parallel != "auto":
        raise ConfigError("--parallel: has no effect with one GPU; leave it out, or say --gpus 2")
    gpu = _gpu_memory(config, args)
    ram = available_bytes() if args.ram is None else int(args.ram * GIB)
    note = limit_note() if args.ram is None else ""
    fit = fit_model(config, gpu, ram, note)
    gguf, model, sizes, placement = fit.source, fit.model, fit.sizes, fit.placement
    memory, in_a_step, routing = fit.memory, fit.step_tokens, fit.routing
    cpu_rates = cpu_rates_of(args, config, gguf, model)
    gpu_rates = None if gpu is None else gpu_rates_of(args)
    streams = [count for count in STREAMS if count <= config.max_num_seqs]
    on_disk = fit.disk
    cache = None
    if on_disk is None or placement.has_cache:
        fetches, drafts = on_disk is None and can_fetch(sizes, placement), num_drafts(config) > 0
        cache = forecast_cache(model, sizes, placement, streams, args.routing_trace, fetches, drafts)
    speed = _speed(config, in_a_step, model, sizes, routing, placement, cpu_rates, gpu_rates, cache)
    from_disk = READ_BYTES_PER_S if args.disk_bandwidth is None else args.disk_bandwidth * 1e9
    disk_cautions: list[str] = []
    if on_disk is not None:
        rate = disk_rate_of(args, gguf.path)
        has_gpu = gpu is not None
        found = forecast_disk(
            *(model, sizes, on_disk.slots, on_disk.pinned, streams, args.routing_trace),
            placement if has_gpu else None,
        )
        speed = on_disk.slowed(speed, found, rate, in_a_step, has_gpu=has_gpu)
        disk_cautions = [on_disk.caution(rate)]
        if has_gpu:
            disk_cautions.append(on_disk.gpu_caution(found))
        if found.is_assumed and cache is None:
            disk_cautions.append(ASSUMED_TEXT)
    tiers = forecast_tiers(
        {
            "ram": (memory.ram_tier, 0.0 if gpu_rates is None else gpu_rates.pcie),
            "disk": (disk_tier_bytes(config, placement), from_disk),
        },
        sizes,
        lambda tokens: model_speed(model, sizes, routing, placement, cpu_rates, gpu_rates).prefill(
            tokens, in_a_step
        ),
        memory.max_model_len,
    )
    return PlacementPlan(
        model=model,
        gguf=gguf,
        placement=placement,
        memory=memory,
        step_tokens=in_a_step,
        ram=ram,
        gpu=gpu,
        users=_users(config, memory),
        cpu_rates=cpu_rates,
        gpu_rates=gpu_rates,
        speed=speed,
        tiers=tiers,
        command=command_line(
            config,
            args,
            memory.kv_tokens,
            has_gpu=gpu is not None,
            # On a GPU, a placement reserves one pool's bytes for these tokens.
        ),
        cautions=_cut_short(gguf) + _cautions(config, args, memory, speed, note, cache) + disk_cautions,
    )


def group_report(config: ServerConfig, args: argparse.Namespace) -> str:
    """Plans for several GPUs with equal memory. Raises UserError as `make_plan` does."""
    num_gpus = len(parse_gpus(config.gpus))
    source = open_metadata(Path(config.model))
    model = gpu_shape(read_checked_shape(source), config.max_model_len)
    gpu = _gpu_memory(config, args)
    if gpu is None:
        obstacle = None if config.device == "cpu" else gpu_obstacle()
        if obstacle is None:
            raise ConfigError("--gpus: has no effect with --device cpu; leave one of them out")
        raise ConfigError(f"--gpus: {obstacle.text}; or give the memory of the planned GPUs: --gpu-memory")
    alone = {
        "--routing-trace": args.routing_trace,
        "--lora-modules": config.lora_modules,
        "--lora-dir": config.lora_dir,
        "--speculative-config": config.speculative_config,
        "--speculative-model": config.speculative_model,
        "--kv-ram": config.kv_ram,
        "--kv-disk": config.kv_disk,
    }
    if given := [flag for flag, value in alone.items() if value]:
        raise ConfigError(f"{', '.join(given)}: is for a single GPU; leave it out, or leave --gpus out")
    refuse_placement_flags(dataclasses.replace(config, parallel=parallel_of(config, model, num_gpus)))
    ram = available_bytes() if args.ram is None else int(args.ram * GIB)
    gpus = plan_group(config, source, model, gpu, ram, num_gpus)
    of_cpu = dataclasses.replace(config, gpus="1", parallel="auto")  # for the CPU, which has no GPUs
    rates = cpu_rates_of(args, of_cpu, source, model)
    speed = GroupSpeed(gpus, heat_counts(config, model), rates, gpu_rates_of(args))
    usable = usable_gpu_bytes(config, gpu)
    in_a_step = min(step_tokens(config.max_num_batched_tokens, each.share.shape, usable) for each in gpus)
    longest = config.max_model_len or model.context_length
    context = min(CONTEXT, longest // 2)
    kv_tokens = min(each.kv_tokens for each in gpus)
    plan = GroupPlan(
        parallel_of(config, model, num_gpus),
        gpu,
        ram,
        in_a_step,
        gpus,
        kv_tokens,
        Speed(
            {n: speed.prefill(n, in_a_step) for n in PROMPTS if n <= longest},
            {n: speed.decode(n, context) for n in STREAMS if n <= config.max_num_seqs},
            context,
        ),
    )
    command = command_line(config, args, kv_tokens, has_gpu=True)
    cautions = ["the GPUs are taken to be alike, and to reach one another's memory by NVLink"]
    if args.gpu_memory is not None and None in (args.gpu_bandwidth, args.gpu_tflops, args.pcie_bandwidth):
        cautions.append(ASSUMED_GPU)
    if args.json:
        return json.dumps(group_json(plan, command, cautions), indent=2)
    size = sum(tensor.nbytes for tensor in source.tensors.values())
    head = f"{source.path.name}: {size / GIB:.2f} GiB of tensors, {model.num_layers} layers"
    return group_text(plan, head, command, cautions)


def _gpu_memory(config: ServerConfig, args: argparse.Namespace) -> int | None:
    """Returns the bytes of GPU memory to plan for: the given number, else the free memory of this machine's GPU."""
    if args.gpu_memory is not None:
        if config.device == "cpu":
            raise ConfigError("--gpu-memory contradicts --device cpu; leave one of them out")
        return int(args.gpu_memory * GIB)
    if choose_device(config.device) == "cpu":
        return None
    import torch

    return int(torch.cuda.mem_get_info(0)[0]) + CUDA_CONTEXT_BYTES  # this process's own context


def measure_cpu(config: ServerConfig, gguf: ModelSource, model: ModelShape) -> CpuRates:
    from moeserve.cli.plan.machine import measure

    return measure(config, gguf, model)


def cpu_rates_of(
    args: argparse.Namespace, config: ServerConfig, gguf: ModelSource, model: ModelShape
) -> CpuRates:
    """Returns the CPU's rates: the user's where given, else measured ones. The time of an operation is always this
    machine's."""
    rates = measure_cpu(config, gguf, model)
    if args.cpu_bandwidth is not None:
        rates = dataclasses.replace(rates, read=args.cpu_bandwidth * 1e9)
    if args.cpu_gops is not None:
        rates = dataclasses.replace(rates, dense_ops=args.cpu_gops * 1e9, expert_ops=args.cpu_gops * 1e9)
    return rates


def disk_rate_of(args: argparse.Namespace, path: Path) -> DiskRate:
    """Returns the disk's rate: as the user states it, else as measured, else an assumed rate."""
    if args.disk_bandwidth is not None:
        return DiskRate(args.disk_bandwidth * 1e9, "--disk-bandwidth")
    return measure_disk(path) or DiskRate(READ_BYTES_PER_S, "assumed; --disk-bandwidth")


def measure_the_gpu() -> GpuRates:
    import torch

    from moeserve.cli.plan.gpu_machine import measure_gpu

    return measure_gpu(torch.device("cuda", 0))


def gpu_rates_of(args: argparse.Namespace) -> GpuRates:
    """Returns the GPU's rates: the user's where given, else measured ones if the plan is for this machine's GPU, else
    assumed ones."""
    rates = GpuRates() if args.gpu_memory is not None else measure_the_gpu()
    return GpuRates(
        read=rates.read if args.gpu_bandwidth is None else args.gpu_bandwidth * 1e9,
        ops=rates.ops if args.gpu_tflops is None else args.gpu_tflops * 1e12,
        pcie=rates.pcie if args.pcie_bandwidth is None else args.pcie_bandwidth * 1e9,
    )


def model_speed(
    model: ModelShape,
    sizes: ModelSizes,
    routing: RoutingProbabilities,
    placement: Placement,
    cpu: CpuRates,
    gpu: GpuRates | None,
    cache: CacheForecast | None = None,
) -> CpuSpeed | HybridSpeed:
    if gpu is None:
        return CpuSpeed(model, sizes, routing, cpu)
    return HybridSpeed(model, sizes, routing, placement, cpu, gpu, cache=cache)


def _speed(
    config: ServerConfig,
    in_a_step: int,
    model: ModelShape,
    sizes: ModelSizes,
    routing: RoutingProbabilities,
    placement: Placement,
    cpu: CpuRates,
    gpu: GpuRates | None,
    cache: CacheForecast | None,
) -> Speed:
    speed = model_speed(model, sizes, routing, placement, cpu, gpu, cache)
    longest = config.max_model_len or model.context_length
    context = min(CONTEXT, longest // 2)
    prompts = [tokens for tokens in PROMPTS if tokens <= longest] or [longest]
    streams = [count for count in STREAMS if count <= config.max_num_seqs]
    known = Speed(
        prefill={tokens: speed.prefill(tokens, in_a_step) for tokens in prompts},
        decode={count: speed.decode(count, context) for count in streams},
        context=context,
    )
    if cache is None or isinstance(speed, CpuSpeed):
        return known
    return dataclasses.replace(
        known,
        hit_rates={count: use.hit_rate for count, use in cache.settled.items()},
        decode_at_first={count: speed.decode(count, context, at_first=True) for count in cache.at_first},
        hit_rates_at_first={count: use.hit_rate for count, use in cache.at_first.items()},
    )


def _users(config: ServerConfig, memory: Memory) -> dict[int, int]:
    sizes = [tokens for tokens in USERS if tokens <= memory.max_model_len] or [memory.max_model_len]
    return {tokens: min(config.max_num_seqs, memory.kv_tokens // tokens) for tokens in sizes}


def _cut_short(source: ModelSource) -> list[str]:
    if not isinstance(source, GGUFFile) or not source.missing_bytes:
        return []
    return [
        f"the file ends before its tensors do, {source.missing_bytes:,} bytes are missing: it can be planned for and "
        "not served; download it again"
    ]


def _cautions(
    config: ServerConfig,
    args: argparse.Namespace,
    memory: Memory,
    speed: Speed,
    note: str,
    cache: CacheForecast | None,
) -> list[str]:
    cautions: list[str] = []
    if config.kv_disk is not None and args.disk_bandwidth is None:
        cautions.append("the disk's speed is assumed (--disk-bandwidth)")
    if note:
        cautions.append(f"memory is what is left of a limit{note}")
    if config.max_model_len is not None and config.max_model_len > memory.kv_tokens:
        cautions.append(
            f"--max-model-len {config.max_model_len} does not fit the KV pool of {memory.kv_tokens} tokens"
        )
    if args.gpu_memory is not None and None in (args.gpu_bandwidth, args.gpu_tflops, args.pcie_bandwidth):
        cautions.append(ASSUMED_GPU)
    if cache is not None and cache.is_assumed:
        cautions.append(ASSUMED_TEXT)
    short = [n for n in speed.decode if n <= MOST_STREAMS and n not in speed.hit_rates]
    if cache is not None and short:
        cautions.append(
            f"--routing-trace has too few tokens for {' and '.join(map(str, short))} at once, whose rate is that of "
            f"experts that stay where they are: record {trace_tokens(max(short)):,} (--record-routing-tokens)"
        )
    if speed.decode[1] > 1 / SHORT_STEP_S:
        cautions.append(
            "steps this short are slowed down by the server's other processes where cores are few: the speed is the "
            "engine's alone"
        )
    return cautions


def command_line(config: ServerConfig, args: argparse.Namespace, kv_tokens: int, *, has_gpu: bool) -> str:
    """Returns the planned server's `moeserve` command line: the flags given to the plan and, with --ram or
    --gpu-memory, the GPU budget and the KV tokens that the plan has fixed."""
    given = {name: getattr(args, name) for name in SHARED if getattr(args, name) is not None}
    if not has_gpu:
        given.pop("expert_heat", None)  # the CPU engine does not use it
    if args.gpu_memory is not None and config.gpu_memory_budget is None:
        given["gpu_memory_budget"] = f"{args.gpu_memory - CUDA_CONTEXT_BYTES / GIB:g}"
    if args.ram is not None or args.gpu_memory is not None:
        given["max_total_tokens"] = str(kv_tokens)
    flags = [
        f"{flag_name(name)} {shlex.join(value if isinstance(value, list) else [str(value)])}"
        for name, value in given.items()
    ]
    return " ".join(["moeserve", *flags])
