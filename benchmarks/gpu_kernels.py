"""The GPU kernels: times beside the physical floor.

    python benchmarks/gpu_kernels.py kernels         each kernel at the shape of Qwen3-30B-A3B
    python benchmarks/gpu_kernels.py decode          48 layers and the head in one CUDA graph, batch 1, 8 and 64
    python benchmarks/gpu_kernels.py prefill         48 layers of 512, 2,048 and 8,192 tokens
    python benchmarks/gpu_kernels.py launch          microseconds that a launch costs the host
    python benchmarks/gpu_kernels.py tune            other tiles beside those chosen (2 minutes of compiling)

Several at once, in this order of output. Needs torch, Triton and a GPU; neither the server nor the C++ extension.
Whether their results are right, tests/kernels says.
The floor is bytes / 4.3 TB/s or operations / 790 TFLOP/s, the larger: one H200's measured rates.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from moeserve.kernels import launch

MODES = ("kernels", "decode", "prefill", "launch", "tune")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modes", nargs="+", choices=MODES)
    parser.add_argument(
        "--no-pdl", action="store_true", help="plain launches, without programmatic dependent launch"
    )
    parser.add_argument(
        "--no-warm-up", action="store_true", help="compile when first needed, not in parallel before"
    )
    options = parser.parse_args()
    if options.no_pdl:
        launch.PDL = False
    from benchmarks.gpu import decode, kernels, prefill, tune, warm_up
    from benchmarks.gpu.launch_cost import measure_launches

    print(torch.cuda.get_device_name(), "torch", torch.__version__, "PDL", launch.pdl(), flush=True)
    started = time.monotonic()
    tasks = [] if options.no_warm_up else warm_up.tasks_for(options.modes)
    patience = 200.0 if "tune" in options.modes else 100.0
    results = warm_up.in_parallel(tasks, pdl=launch.pdl(), patience=patience) if tasks else {}
    print(f"[compiled: {time.monotonic() - started:.0f} s]", flush=True)
    warm_up.report_failures(results)
    runs = {
        "kernels": kernels.run,
        "decode": decode.run,
        "prefill": prefill.run,
        "launch": measure_launches,
        "tune": tune.run,
    }
    for mode in options.modes:
        started = time.monotonic()
        runs[mode]()
        print(f"[{mode}: {time.monotonic() - started:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
