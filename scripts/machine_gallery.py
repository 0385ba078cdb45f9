"""Writes docs/reference/machines.md: `python scripts/machine_gallery.py`. Ten machines, a model for each, and what
`moeserve plan` predicts; a test holds the page to what this writes.

The models are headers with a published model's shape and the types of its usual file (benchmarks/family_file.py).
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from gguf import GGML_QUANT_SIZES, GGUFValueType  # noqa: E402
from gguf.constants import GGMLQuantizationType as Type  # noqa: E402

from benchmarks.family_file import FALLBACK, SHAPES, File, type_of  # noqa: E402
from moeserve.cli.main import main as moeserve  # noqa: E402
from moeserve.cli.plan import command as plan_command  # noqa: E402
from moeserve.cli.plan.rates import CpuRates  # noqa: E402
from moeserve.config.units import GIB  # noqa: E402
from tests.support.models.model_header import QWEN3_30B_A3B, write_header  # noqa: E402

PAGE = REPOSITORY / "docs" / "reference" / "machines.md"
CONTEXT = "32768"


@dataclass(frozen=True)
class Machine:
    """Rates as of data sheets, RAM at 80% of its peak."""

    name: str
    model: str
    ram: int  # GiB that the server may take
    ram_rate: int  # GB/s
    cpu_gops: int  # 10^9 multiplications and additions in 8 bits a second
    gpu: int | None = None  # GiB
    gpu_rate: int = 0  # GB/s
    gpu_tflops: int = 0  # bfloat16
    pcie: int = 0  # GB/s
    gpus: int = 1

    @property
    def flags(self) -> list[str]:
        """The machine in the words of `moeserve plan`."""
        found = ["--max-model-len", CONTEXT, "--ram", str(self.ram), "--cpu-bandwidth", str(self.ram_rate)]
        found += ["--cpu-gops", str(self.cpu_gops)]
        if self.gpu is None:
            return [*found, "--device", "cpu"]
        found += ["--gpu-memory", str(self.gpu), "--gpu-bandwidth", str(self.gpu_rate)]
        found += ["--gpu-tflops", str(self.gpu_tflops), "--pcie-bandwidth", str(self.pcie)]
        return found if self.gpus == 1 else [*found, "--gpus", str(self.gpus)]


IQ2, GPT_OSS, QWEN36, GLM = "qwen3-30b-a3b-iq2_xxs", "gpt-oss-20b", "qwen3.6-35b-a3b", "glm-4.5-air"
MACHINES = (
    Machine("laptop, 16 GB DDR5", IQ2, 13, 60, 400),
    Machine("laptop, 32 GB LPDDR5X", GPT_OSS, 27, 95, 600),
    Machine("small desktop, 64 GB DDR5", QWEN36, 58, 70, 800),
    Machine("desktop, 32 GB DDR4, RTX 4060 8 GB", GPT_OSS, 27, 40, 600, 8, 272, 30, 13),
    Machine("desktop, 64 GB DDR4, RTX 3060 12 GB", QWEN36, 58, 40, 600, 12, 360, 25, 25),
    Machine("desktop, 64 GB DDR5, RTX 4070 12 GB", QWEN36, 58, 70, 1200, 12, 504, 58, 25),
    Machine("desktop, 128 GB DDR5, RTX 3090 24 GB", QWEN36, 118, 70, 1200, 24, 936, 71, 25),
    Machine("desktop, 128 GB DDR5, RTX 5090 32 GB", GLM, 118, 75, 1500, 32, 1792, 209, 50),
    Machine("server, 384 GB DDR5 on 12 channels, no GPU", GLM, 360, 370, 6000),
    Machine("server, 256 GB DDR5, 4 GPUs of 24 GB", GLM, 240, 245, 4000, 24, 936, 71, 25, gpus=4),
)


class Header(File):
    """A file whose tensors have names, shapes and types, and no bytes."""

    def matrix(self, name: str, kind: Type, *shape: int, std: float | None = None) -> None:
        if kind is not Type.F32 and shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = FALLBACK[kind]
        columns, size = GGML_QUANT_SIZES[kind]
        elements = int(np.prod(shape))
        stored = shape if kind is Type.F32 else (*shape[:-1], shape[-1] // columns * size)
        dtype = np.dtype("float32" if kind is Type.F32 else "uint8")
        self.writer.add_tensor_info(name, stored, dtype, elements // columns * size, raw_dtype=kind)

    def vector(self, name: str, size: int, mean: float, std: float) -> None:
        self.matrix(name, Type.F32, size)


def write_model(folder: Path, name: str) -> Path:
    path = folder / f"{name}.gguf"
    if path.exists():
        return path
    if name == IQ2:
        write_header(path, QWEN3_30B_A3B, type_of("IQ2_XXS"))
        return path
    shape = SHAPES[name]
    file = Header(str(path), shape.architecture)
    file.writer.add_file_type(15)
    hidden = shape.write(file, shape.layers)
    tokens = shape.vocabulary // 64 * 64
    file.matrix("token_embd.weight", shape.embedding, tokens, hidden)
    file.vector("output_norm.weight", hidden, 1, 0.1)
    file.matrix("output.weight", shape.head, tokens, hidden)
    # A plan asks for the tokens' number alone. gguf-py takes seconds to look at the type of each, and to write more.
    strings = GGUFValueType.STRING
    file.writer.add_key_value("tokenizer.ggml.tokens", ["t"] * tokens, GGUFValueType.ARRAY, sub_type=strings)
    file.writer.write_header_to_file()
    file.writer.write_kv_data_to_file()
    file.writer.write_ti_data_to_file()
    file.writer.close()
    return path


def plan(machine: Machine, model: Path) -> dict[str, Any]:
    """What `moeserve plan --json` prints, without anything measured here."""
    given = CpuRates(read=1, dense_ops=1, expert_ops=1, op_s=2e-6, step_s=3e-4, row_s=2e-5)
    printed = io.StringIO()
    with (
        mock.patch.object(plan_command, "measure_cpu", return_value=given),
        contextlib.redirect_stdout(printed),
    ):
        code = moeserve(["plan", str(model), *machine.flags, "--json"])
    assert code == 0, machine.name
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def gpu_gib(found: dict[str, Any]) -> float:
    """Weights, buffers and KV of a GPU; with several GPUs the weights of the fullest."""
    if "gpus" in found:
        return float(max(gpu["gpu_weights"] for gpu in found["gpus"])) / GIB
    return float(found["memory"]["gpu"]) / GIB


def ram_gib(found: dict[str, Any]) -> float:
    if "gpus" in found:
        return float(sum(gpu["ram_weights"] for gpu in found["gpus"])) / GIB
    return float(found["memory"]["ram_start"]) / GIB


def rate(speeds: dict[str, float], key: str) -> str:
    return f"{speeds[key]:,.0f}" if speeds[key] >= 10 else f"{speeds[key]:.1f}"


def row(machine: Machine, folder: Path) -> str:
    """The machine's row of predictions; its model's header is written to `folder`, if it is not there."""
    found = plan(machine, write_model(folder, machine.model))
    speed = found["speed"]
    on_gpu = "" if machine.gpu is None else f"{gpu_gib(found):.1f}"
    first = 4096 / speed["prefill"]["4096"]
    return (
        f"| {machine.name} | {machine.model} | {ram_gib(found):.1f} | {on_gpu} | {first:.1f} | "
        f"{rate(speed['decode'], '1')} | {rate(speed['decode'], '4')} |"
    )


def command(machine: Machine) -> str:
    wanted = ["moeserve", f"{machine.model}.gguf", "--max-model-len", CONTEXT]
    wanted += ["--device", "cpu"] if machine.gpu is None else []
    wanted += ["--gpus", str(machine.gpus)] if machine.gpus > 1 else []
    return " ".join(wanted)


def page(rows: Iterable[str]) -> Iterator[str]:
    """The page's lines. rows: those of MACHINES."""
    yield from (
        "# Ten machines",
        "",
        "<!-- Made by scripts/machine_gallery.py, which writes it anew. -->",
        "",
        "These are predictions of [`moeserve plan`](../how-to/place-experts.md), not measurements. The rates in the",
        "second table are assumed after data sheets, as are 2 µs an operation and 0.3 ms a step of the CPU engine.",
        "On a machine of your own run `moeserve plan MODEL`, which measures the rates. [How far predictions are from",
        "measurements](../results/planner.md).",
        "",
        "| machine | model | RAM, GiB | GPU, GiB | prompt of 4,096 tokens, s | one answer, tok/s | 4 answers, tok/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    )
    yield from rows
    yield from (
        "",
        "RAM: the processes and weights before the first request; with four GPUs the weights alone. GPU: weights,",
        "buffers and KV; with four GPUs the weights of the fullest. Answers come after prompts of 512 tokens; the rate",
        "of 4 is that of all together, and an expert cache has had time to settle. It can be lower than that of one:",
        "four texts share the cache's slots, so each token finds fewer of its experts on the GPU.",
        "",
        "| machine | command | RAM, GB/s | CPU, 10⁹ op/s | GPU, GB/s | GPU, TFLOPS | PCIe, GB/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    )
    for machine in MACHINES:
        gpu = (machine.gpu_rate, machine.gpu_tflops, machine.pcie)
        figures = " | ".join("" if machine.gpu is None else f"{one:,}" for one in gpu)
        yield f"| {machine.name} | `{command(machine)}` | {machine.ram_rate} | {machine.cpu_gops:,} | {figures} |"
    yield from (
        "",
        "The files: gpt-oss-20b in MXFP4, Qwen3.6-35B-A3B and GLM-4.5-Air in Q4_K_M, Qwen3-30B-A3B with experts in",
        "IQ2_XXS and the rest as in Q4_K_M. In place of a file a command takes a [name on the Hugging Face",
        "Hub](hub-names.md), `org/repo:Q4_K_M`.",
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text("\n".join(page(row(machine, Path(folder)) for machine in MACHINES)) + "\n")
