"""Who may know whom: the table behind `test_imports.py`, which docs/explanation/architecture.md puts in words."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "moeserve"

# A child process's own frame: allowed to every process's package, unlike another process's package.
FRAME = {
    "moeserve.process",
    "moeserve.lasting_imports",
    "moeserve.config",
    "moeserve.runtime_paths",
    "moeserve.errors",
    "moeserve.messages",
    "moeserve.logs",
    "moeserve.tracing",
    "moeserve.version",
    "moeserve.units",
    "moeserve.process_limits",
}

# One package an architecture; `models.registry` alone may name them.
FAMILIES = {f"moeserve.models.{path.parent.name}" for path in (PACKAGE / "models").glob("*/family.py")}

# What a model is loaded from, and what may be known of it; none of it knows torch.
MODEL_FILES = {
    "moeserve.models.errors",
    "moeserve.models.sources.gguf",
    "moeserve.models.sources.huggingface",
    "moeserve.models.sources.splits",
    "moeserve.models.sources.regular_file",
    "moeserve.models.sources.source",
    "moeserve.models.interface",
    "moeserve.models.latent",
    "moeserve.models.open",
    "moeserve.models.registry",
    "moeserve.models.qwen_hybrid",
    "moeserve.models.shape_reader",
    "moeserve.models.skipped_layers",
    "moeserve.models.step_buffers",
    "moeserve.models.tensors",
    "moeserve.quantization",
    *FAMILIES,
}

# What a shape says of kernels.
KERNEL_OPTIONS = {
    "moeserve.kernels.delta_net.heads",
    "moeserve.kernels.experts.options",
    "moeserve.kernels.routing.options",
}

READERS = {
    "moeserve.models.errors",
    "moeserve.models.sources.gguf",
    "moeserve.models.sources.huggingface.delta_net",
    "moeserve.models.sources.huggingface.latent",
    "moeserve.models.sources.huggingface.mapping",
    "moeserve.models.sources.huggingface.proportional_rope",
    "moeserve.models.sources.source",
    "moeserve.quantization",
}
FAMILY_NEEDS = READERS | {
    "moeserve.models.interface",
    "moeserve.models.latent",
    "moeserve.models.shape_reader",
    "moeserve.kernels.routing.options",
}

# Within httpserver, imports run from an API's folder to what the APIs share, and from there to HTTP itself. No API
# knows another, nor the table that lists them.
HTTP_APIS = ("openai", "responses", "anthropic", "lightllm", "llama_server", "ollama")
HTTPSERVER: dict[str, set[str]] = {
    "moeserve.httpserver.transport": {"moeserve.config", "moeserve.errors", "moeserve.logs"},
    "moeserve.httpserver.observability": {
        "moeserve.httpserver.transport",
        "moeserve.version",
        "moeserve.messages",
        "moeserve.tracing",
    },
    "moeserve.httpserver.generation": FRAME
    | {
        "moeserve.httpserver.transport",
        "moeserve.httpserver.observability",
        "moeserve.tokenizer",
        "moeserve.grammar",
        "moeserve.chatformat",
    },
    "moeserve.httpserver.web": {"moeserve.httpserver.transport"},
    **{
        f"moeserve.httpserver.{api}": {
            "moeserve.httpserver.generation",
            "moeserve.httpserver.transport",
            "moeserve.config",
            "moeserve.errors",
            "moeserve.messages",
            "moeserve.chatformat",
            "moeserve.grammar.spec",
            "moeserve.version",
        }
        for api in HTTP_APIS
    },
    "moeserve.httpserver.native": {
        "moeserve.models.adapters.modules",
        "moeserve.httpserver.generation",
        "moeserve.httpserver.transport",
        "moeserve.messages",
        "moeserve.placement.heat",
        "moeserve.version",
    },
}

# What each package may import of ours, besides itself. What is not listed here may import anything of ours.
ALLOWED: dict[str, set[str]] = {
    "moeserve.messages": set(),
    "moeserve.errors": set(),
    "moeserve.config": set(),
    "moeserve.runtime_paths": {"moeserve.config"},
    "moeserve.logs": set(),
    "moeserve.tracing": {"moeserve.config", "moeserve.errors", "moeserve.version"},
    "moeserve.version": set(),
    "moeserve.units": set(),
    "moeserve.process_limits": {"moeserve.errors", "moeserve.units"},
    "moeserve.quantization": set(),
    "moeserve.router.core": {"moeserve.messages"},
    "moeserve.router": FRAME | {"moeserve.models.adapters.modules"},
    "moeserve.detokenizer": FRAME
    | {"moeserve.tokenizer", "moeserve.models.open", "moeserve.models.registry"},
    "moeserve.httpserver": FRAME
    | {
        "moeserve.models.adapters.modules",
        "moeserve.listeners",
        "moeserve.tokenizer",
        "moeserve.models.errors",
        "moeserve.models.open",
        "moeserve.models.sources.source",
        "moeserve.grammar",
        "moeserve.chatformat",
        "moeserve.placement.heat",
    },
    **HTTPSERVER,
    "moeserve.tokenizer": {*MODEL_FILES, "moeserve.errors", "moeserve.sandbox"},
    "moeserve.grammar": {
        "moeserve.tokenizer",
        "moeserve.models.open",
        "moeserve.errors",
        "moeserve.sandbox",
    },
    "moeserve.chatformat": set(),
    "moeserve.sandbox": set(),
    "moeserve.models.sources.gguf": {
        "moeserve.errors",
        "moeserve.models.errors",
        "moeserve.models.sources.regular_file",
        "moeserve.quantization",
    },
    "moeserve.models.sources.huggingface": {
        "moeserve.errors",
        "moeserve.models.errors",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.splits",
        "moeserve.models.sources.regular_file",
        "moeserve.quantization",
    },
    "moeserve.models.interface": READERS | KERNEL_OPTIONS | {"moeserve.models.latent"},
    "moeserve.models.latent": {"moeserve.models.sources.gguf"},
    "moeserve.models.tensors": {
        "moeserve.models.interface",
        "moeserve.models.latent",
        "moeserve.models.sources.gguf",
    },
    "moeserve.models.shape_reader": READERS
    | {
        "moeserve.models.interface",
        "moeserve.models.tensors",
        "moeserve.kernels.delta_net.heads",
        "moeserve.kernels.routing.options",
    },
    "moeserve.models.skipped_layers": {
        "moeserve.models.interface",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.source",
    },
    "moeserve.models.step_buffers": {
        "moeserve.models.interface",
        "moeserve.models.latent",
        "moeserve.kernels.delta_net.heads",
    },
    "moeserve.models.qwen_hybrid": FAMILY_NEEDS,
    **{family: FAMILY_NEEDS | {"moeserve.models.qwen_hybrid"} for family in FAMILIES},
    "moeserve.kv": {
        "moeserve.config",
        "moeserve.errors",
        "moeserve.models.interface",
        "moeserve.kernels.host_pinning",
        "moeserve.kernels.pages",
        "moeserve.kernels.stream_operands",
        "moeserve.units",
    },
    "moeserve.models.adapters": {
        "moeserve.errors",
        "moeserve.models.errors",
        "moeserve.models.interface",
        "moeserve.models.registry",  # what of checkpoints no shape says
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.huggingface",
    },
    "moeserve.models": {"moeserve.kernels", "moeserve.errors", "moeserve.quantization"},
    "moeserve.models.rank_share": {
        "moeserve.models.interface",
        "moeserve.models.sources.gguf",
        "moeserve.models.tensors",
    },
    "moeserve.placement": {
        "moeserve.models.sources.gguf",
        "moeserve.models.interface",
        "moeserve.models.rank_share",
        "moeserve.models.tensors",
        "moeserve.models.step_buffers",
        "moeserve.kv.layout",
        "moeserve.kv.state_capacity",
        "moeserve.kv.window_capacity",
        "moeserve.kv.tier_sizes",
        "moeserve.config",
        "moeserve.errors",
        "moeserve.units",
    },
    "moeserve.kernels": {"moeserve.errors", "moeserve.quantization"},
    "moeserve.remote": FRAME
    | {
        "moeserve.models.adapters.modules",
        "moeserve.models.open",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.source",
        "moeserve.command_line",
    },
    "moeserve.remote.worker": {"moeserve.process", "moeserve.worker.__main__"},
    "moeserve.remote.command": FRAME
    | {
        "moeserve.launcher",
        "moeserve.models.open",
        "moeserve.command_line",
        "moeserve.remote",
    },
    "moeserve.remote.host": FRAME | {"moeserve.launcher", "moeserve.remote"},
    "moeserve.hub": {"moeserve.errors", "moeserve.models.sources.huggingface", "moeserve.models.registry"},
    "moeserve.control_groups": set(),
    "moeserve.cpus": {"moeserve.control_groups"},
    "moeserve.worker": FRAME
    | {
        "moeserve.deferred_modules",
        "moeserve.control_groups",
        "moeserve.cpus",
        "moeserve.kv",
        "moeserve.models",
        "moeserve.kernels",
        "moeserve.quantization",
        "moeserve.placement",
        "moeserve.expert_cache",
        "moeserve.tokenizer",
        "moeserve.grammar",
        "moeserve.dump.format",
        "moeserve.sandbox.frames",  # the line between several GPUs' processes
    },
    "moeserve.dump": {"moeserve.errors"},
    "moeserve.process": FRAME,
    "moeserve.zygote": FRAME
    | {"moeserve.router.__main__", "moeserve.detokenizer.__main__", "moeserve.tokenizer"},
    "moeserve.zygote.forking": {"moeserve.process"},
    "moeserve.workload": {"moeserve.errors"},
    "moeserve.expert_cache": {"moeserve.errors"},
    "moeserve.simulate": FRAME
    | {"moeserve.workload", "moeserve.router", "moeserve.command_line", "moeserve.placement.step_tokens"},
    "moeserve.launcher": FRAME | {"moeserve", "moeserve.listeners"},
    "moeserve.launcher.exit_codes": set(),
    "moeserve.listeners": {"moeserve.config", "moeserve.errors"},
}
# Who alone may import what stands above the processes: the command line, what it starts and what it runs.
IMPORTED_FROM_ABOVE = {
    "moeserve.cli": {"moeserve.__main__"},
    "moeserve.launcher": {"moeserve.cli", "moeserve.remote.command", "moeserve.remote.host"},
    "moeserve.bench": {"moeserve.cli", "moeserve.plan"},
    "moeserve.plan": {"moeserve.cli"},
    "moeserve.simulate": {"moeserve.cli", "moeserve.bench"},
}
TORCH_ALLOWED = (
    "moeserve.worker",
    "moeserve.models",
    "moeserve.kernels",
    "moeserve.kv.cache",
    "moeserve.kv.cache_pages",
    "moeserve.kv.device_pages",
    "moeserve.kv.host_blocks",
    "moeserve.kv.states",
    "moeserve.plan",
    "moeserve.bench.engine",
)
TORCH_FORBIDDEN_WITHIN = (
    "moeserve.models.adapters",
    *MODEL_FILES,
    *KERNEL_OPTIONS,
    "moeserve.models.rank_share",
    "moeserve.models.sources.rank_source",
)
# Outside the standard library, the pure core knows only what the messages are made of.
CORE_THIRD_PARTY = {"msgspec"}
