"""The options of `moeserve plan`: the server's options that mean the same here, and options that describe the
machine."""

from __future__ import annotations

import argparse

from moeserve.cli.command_line import add_shared_options
from moeserve.cli.plan.rates import GpuRates
from moeserve.cli.workload.options import real

_PLACEMENT = (
    "num_gpu_experts",
    "gpu_memory_budget",
    "unpacked_experts",
    "expert_heat",
    "placement_rules",
    "n_gpu_layers",
    "expert_cache",
)
# Options of the server that have the same meaning here.
SHARED = (
    "model",
    "speculative_config",
    "speculative_model",
    "mmproj",
    "mmproj_device",
    "image_max_tokens",
    "image_cache",
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
    "expert_ram",
    "numa_nodes",
    "cpu_binding",
    *_PLACEMENT,
)


def command_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve plan",
        usage="%(prog)s [MODEL ...] [options]",
        description=(
            "Show where each tensor would be placed, what fits, and the predicted speed, without loading the model; "
            "a file with the header alone is enough. The prediction uses this machine's speeds, which it measures in "
            "two seconds. With several models, it shows which of them fit into memory together."
        ),
        allow_abbrev=False,
    )
    add_shared_options(parser, SHARED)
    machine = parser.add_argument_group("the machine")
    number, gpu = real(0, 1e9, above=True), GpuRates()

    def assumed(rate: float) -> str:
        return f"default: measured; {rate:g} if --gpu-memory is given"

    machine.add_argument(
        "--gpu-memory",
        type=number,
        metavar="GIB",
        help="plan for a GPU with this much memory, also on a machine without a GPU (default: this machine's GPU)",
    )
    machine.add_argument(
        "--ram", type=number, metavar="GIB", help="RAM for the server (default: the free RAM)"
    )
    for flag, metavar, text in (
        ("--cpu-bandwidth", "GB/s", "rate at which all cores together read RAM (default: measured)"),
        (
            "--cpu-gops",
            "GOPS",
            "billions of 8-bit multiplications and additions per second, all cores (default: measured)",
        ),
        ("--gpu-bandwidth", "GB/s", f"rate at which the GPU reads its memory ({assumed(gpu.read / 1e9)})"),
        ("--gpu-tflops", "TFLOPS", f"the GPU's bfloat16 rate ({assumed(gpu.ops / 1e12)})"),
        ("--pcie-bandwidth", "GB/s", f"rate of copies from RAM to the GPU ({assumed(gpu.pcie / 1e9)})"),
        (
            "--disk-bandwidth",
            "GB/s",
            "rate at which the disk is read, for experts on disk, --kv-disk and loading models (default: measured if "
            "experts are on disk, else 1)",
        ),
    ):
        machine.add_argument(flag, type=number, metavar=metavar, help=text)
    parser.add_argument(
        "--routing-trace",
        metavar="FILE",
        help=(
            "predict from this trace how often the expert cache, or RAM if experts are on disk, has an expert. A "
            "server with --record-routing-trace records such a file (default: a generated trace with the locality of "
            "published ones)"
        ),
    )
    parser.add_argument(
        "--verbose", action="store_true", help="list each tensor with its size and place (default: only sums)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    return parser
