"""The options of `moeserve plan`: those of the server that mean the same here, and the machine's."""

from __future__ import annotations

import argparse

from moeserve.cli.command_line import add_shared_options
from moeserve.cli.plan.rates import GpuRates
from moeserve.cli.workload.options import real

_PLACEMENT = (
    "num_gpu_experts",
    "gpu_memory_budget",
    "expert_heat",
    "placement_rules",
    "n_gpu_layers",
    "expert_cache",
)
# Options of the server that mean the same here.
SHARED = (
    "model",
    "lora_modules",
    "lora_dir",
    "max_loras",
    "lora_memory",
    "device",
    "gpus",
    "parallel",
    "max_model_len",
    "max_num_seqs",
    "max_total_tokens",
    "max_num_batched_tokens",
    "kv_cache_dtype",
    "prefix_cache",
    "kv_ram",
    "kv_disk",
    "kv_disk_gib",
    "kv_window_ratio",
    "state_snapshot_budget",
    "threads",
    "isa",
    "numa_nodes",
    "cpu_binding",
    *_PLACEMENT,
)


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve plan",
        usage="%(prog)s [options]",
        description="Where every tensor would go, what fits and how fast it would be, without loading the model. The "
        "file may end where its tensors begin. Speed is predicted from this machine's, measured in two seconds.",
        allow_abbrev=False,
    )
    add_shared_options(parser, SHARED)
    machine = parser.add_argument_group("the machine")
    number, gpu = real(0, 1e9, above=True), GpuRates()

    def assumed(rate: float) -> str:
        return f"default: measured; with --gpu-memory {rate:g} is assumed"

    machine.add_argument(
        "--gpu-memory", type=number, metavar="GIB", help="plan for a GPU with so much memory"
    )
    machine.add_argument(
        "--ram", type=number, metavar="GIB", help="RAM for the server (default: what is free)"
    )
    for flag, metavar, text in (
        ("--cpu-bandwidth", "GB/s", "what all cores together read from RAM (default: measured)"),
        ("--cpu-gops", "GOPS", "8-bit multiplications and additions a second (default: measured)"),
        ("--gpu-bandwidth", "GB/s", f"what the GPU reads from its memory ({assumed(gpu.read / 1e9)})"),
        ("--gpu-tflops", "TFLOPS", f"what the GPU computes in bfloat16 ({assumed(gpu.ops / 1e12)})"),
        ("--pcie-bandwidth", "GB/s", f"from RAM to the GPU ({assumed(gpu.pcie / 1e9)})"),
        ("--disk-bandwidth", "GB/s", "what --kv-disk is read with (default: 1)"),
    ):
        machine.add_argument(flag, type=number, metavar=metavar, help=text)
    parser.add_argument(
        "--routing-trace",
        metavar="FILE",
        help="predict what the expert cache finds by this trace, which a server has recorded "
        "(--record-routing-trace; default: a text that uses its experts again as published traces do)",
    )
    parser.add_argument("--verbose", action="store_true", help="every tensor")
    parser.add_argument("--json", action="store_true", help="JSON instead of text")
    return parser
