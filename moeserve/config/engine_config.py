"""The options of the CPU engine and of the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeserve.config.option import option
from moeserve.config.speculative import SpeculativeConfig

MEASURED = ("auto", "measure")  # values of --isa that name no instruction set


@dataclass(frozen=True, slots=True)
class EngineConfig(SpeculativeConfig):
    """The options of the CPU engine and of the GPU, as fields of the configuration."""

    threads: int | None = option(
        None,
        "CPU engine",
        "number of compute threads (default: one per physical core that is available; one less with a GPU "
        "on 8 or more cores, which leaves a core to the thread that drives the GPU). Lower it if other "
        "programs need cores",
        low=1,
        high=1024,
    )
    isa: str = option(
        "auto",
        "CPU engine",
        "instruction set of the CPU kernels. auto: the best that this CPU supports; steps of few tokens use the "
        "fastest one, which the first start measures and stores; measure: as auto, but measure again; the others use "
        "one instruction set for everything, for comparisons",
        choices=(
            *MEASURED,
            "plain",
            "avx2",
            "avx_vnni",
            "avx512_vnni",
            "avx512_vbmi",
            "neon_dotprod",
            "neon_i8mm",
        ),
    )
    weight_layout: str = option(
        "panels",
        "CPU engine",
        "panels: repack weights while loading, for the fastest decoding; file: compute from the "
        "memory-mapped GGUF file as it is, for an instant start and less memory, but slower steps (do not "
        "change the file while it is served; not with a GPU)",
        choices=("panels", "file"),
    )
    expert_ram: float | None = option(
        None,
        "CPU engine",
        "RAM for routed experts; with a GPU: for the experts that are not on the GPU alone. If it does not hold all "
        "of them, an expert that is missing when a token is routed to it is read from the GGUF file, which is slower, "
        "and takes the place of one that was used less. Lower it to leave RAM to other programs. Not with several "
        "GPUs, a folder of safetensors or --weight-layout file, or if the CPU computes the first layers of a GPU's "
        "model (default: all of them; if they do not fit, as many as fit beside the other weights and, without a GPU, "
        "a small KV pool)",
        low=0.001,
        high=1e6,
        metavar="GIB",
    )
    numa_nodes: int | None = option(
        None,
        "CPU engine",
        "number of NUMA nodes among which weights and threads are divided, so that each thread reads memory "
        "that is near it (default: the machine's nodes; a larger number divides further, for tests)",
        low=1,
        high=1024,
    )
    cpu_binding: str = option(
        "auto",
        "CPU engine",
        "CPU cores on which each compute thread may run. cores: one core of its own; nodes: the cores of "
        "its NUMA node, for machines whose cores other programs use too; none: all cores; auto: cores if "
        "there are as many cores as threads, else nodes",
        choices=("auto", "cores", "nodes", "none"),
    )
    num_gpu_experts: int | None = option(
        None,
        "GPU",
        "number of experts of each layer to place in GPU memory: those most used by --expert-heat, else the "
        "first N by id. Lower it to give the KV cache more GPU memory (default: as many as fit)",
        low=0,
        high=4096,
    )
    gpu_memory_budget: float | None = option(
        None,
        "GPU",
        "GPU memory for weights, KV cache and buffers together; experts that do not fit stay in RAM. Lower "
        "it if other programs use the GPU (default: all that is free)",
        low=0.01,
        high=1e6,
        metavar="GIB",
    )
    unpacked_experts: float | Literal["auto"] = option(
        "auto",
        "GPU",
        "GPU memory that holds experts a second time, as 16-bit floats, for as many layers as fit. Steps of "
        "more than 512 tokens then do not unpack these layers' weights, so prompts are read up to 1.4 times "
        "as fast; the KV cache gets less memory. auto: if one GPU holds all experts, half of the KV cache's "
        "memory (less if the KV cache would then have fewer than 8192 tokens for each of --max-num-seqs "
        "requests), or all that the KV cache cannot use, whichever is more. 0: none, if many long "
        "conversations need the KV cache. Not with several GPUs",
        low=0.0,
        high=1e6,
        choices=("auto",),
        metavar="GIB",
    )
    expert_heat: str | None = option(
        None,
        "GPU",
        "file with the number of times that each expert was used, as /v1/experts/heat exports it: the most "
        "used experts are placed on the GPU first (default: none; experts are placed by id)",
        metavar="PATH",
    )
    placement_rules: str | None = option(
        None,
        "GPU",
        "YAML file of rules that place tensors on the GPU or in RAM by name; tensors without a matching "
        "rule follow the other flags. On the CPU engine, rules choose the experts that stay in RAM when "
        "others are on disk. For placements that --num-gpu-experts and --n-gpu-layers cannot express. Not "
        "with several GPUs (default: none)",
        metavar="PATH",
    )
    n_gpu_layers: int | None = option(
        None,
        "GPU",
        "place only the last N layers on the GPU and compute the others on the CPU, for GPUs too small for the "
        "attention weights of all layers. Not with several GPUs (default: as many as fit)",
        low=0,
        high=1024,
    )
    expert_cache: str = option(
        "auto",
        "GPU",
        "whether experts move between RAM and GPU memory while the server runs. auto: if not all experts "
        "fit on the GPU, those that the current texts use replace unused ones there (needs RAM for all experts or, "
        "with one GPU, a GGUF file from which the rest are read; not on several NUMA nodes, nor with --parallel "
        "tensor); off: experts stay where they were placed, and the same steps give the same bits, for comparisons",
        choices=("auto", "off"),
    )
    gpu_prefill_token_threshold: int | None = option(
        None,
        "GPU",
        "number of tokens from which a step with prompts copies the experts in RAM to the GPU and computes "
        "all of them there; in smaller steps the CPU computes them. Lower it for a slow CPU, raise it for "
        "a slow PCIe link. No effect if some experts are on disk or on several NUMA nodes; not with --parallel "
        "tensor (default: chosen from speeds measured at the start: none of these experts in small steps, a growing "
        "share of them in larger ones)",
        low=1,
        high=1 << 20,
    )
