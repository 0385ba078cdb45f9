"""What each package may import: the table behind `test_imports.py`. docs/explanation/architecture.md explains the
rules; `layer_rules.py` has those that hold across packages."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "moeserve"

# A child process's own frame: allowed to every process's package, unlike another process's package.
FRAME = {
    "moeserve",
    "moeserve.config",
    "moeserve.errors",
    "moeserve.messages",
    "moeserve.processes",
    "moeserve.sampling",
}

# One package an architecture; `models.registry` alone may name them.
FAMILIES = {f"moeserve.models.{path.parent.name}" for path in (PACKAGE / "models").glob("*/family.py")}

# What a model is loaded from, and what may be known of it; none of it knows torch.
MODEL_FILES = {
    "moeserve.models.errors",
    "moeserve.models.sources.gguf",
    "moeserve.models.sources.huggingface",
    "moeserve.models.sources.experts_in_file",
    "moeserve.models.sources.model_files",
    "moeserve.models.sources.splits",
    "moeserve.models.sources.regular_file",
    "moeserve.models.sources.source",
    "moeserve.models.gpu_features",
    "moeserve.models.attention",
    "moeserve.models.feed_forward",
    "moeserve.models.interface",
    "moeserve.models.column_orders",
    "moeserve.models.compressed",
    "moeserve.models.indexer",
    "moeserve.models.latent",
    "moeserve.models.mamba2",
    "moeserve.models.recurrence",
    "moeserve.models.recurrent_heads",
    "moeserve.models.residual",
    "moeserve.models.rope_scaling",
    "moeserve.models.neutral_settings",
    "moeserve.models.open",
    "moeserve.models.registry",
    "moeserve.models.qwen_hybrid",
    "moeserve.models.shape_reader",
    "moeserve.models.short_conv",
    "moeserve.models.skipped_layers",
    "moeserve.models.step_buffers",
    "moeserve.models.cpu_step_buffers",
    "moeserve.models.tensors",
    "moeserve.quantization",
    *FAMILIES,
}

# What a shape says of kernels.
KERNEL_OPTIONS = {
    "moeserve.kernels.choice_rule",
    "moeserve.kernels.delta_net.heads",
    "moeserve.kernels.gating",
    "moeserve.kernels.mamba2.heads",
    "moeserve.kernels.ngrams.hashing",
    "moeserve.kernels.routing.options",
    "moeserve.kernels.short_conv.heads",
}

READERS = {
    "moeserve.models.errors",
    "moeserve.models.sources.gguf",
    "moeserve.models.sources.huggingface.config_json",
    "moeserve.models.sources.huggingface.delta_net",
    "moeserve.models.sources.huggingface.expert_matrices",
    "moeserve.models.sources.huggingface.layer_settings",
    "moeserve.models.sources.huggingface.experts_by_token",
    "moeserve.models.sources.huggingface.latent",
    "moeserve.models.sources.huggingface.llama3_rope",
    "moeserve.models.sources.huggingface.mamba2",
    "moeserve.models.sources.huggingface.mapping",
    "moeserve.models.sources.huggingface.next_token_names",
    "moeserve.models.sources.huggingface.proportional_rope",
    "moeserve.models.sources.huggingface.remade",
    "moeserve.models.sources.huggingface.rope_by_kind",
    "moeserve.models.sources.source",
    "moeserve.quantization",
}
FAMILY_NEEDS = READERS | {
    "moeserve.models.compressed",
    "moeserve.models.indexer",
    "moeserve.models.attention",
    "moeserve.models.feed_forward",
    "moeserve.models.interface",
    "moeserve.models.latent",
    "moeserve.models.recurrence",
    "moeserve.models.recurrent_heads",
    "moeserve.models.residual",
    "moeserve.models.rope_scaling",
    "moeserve.models.shape_reader",
    "moeserve.kernels.choice_rule",
    "moeserve.kernels.ngrams.hashing",
    "moeserve.kernels.routing.options",
}

# Within httpserver, imports run from an API's folder to what the APIs share, and from there to HTTP itself. No API
# knows another, nor the table that lists them.
HTTP_APIS = ("openai", "responses", "anthropic", "batches", "lightllm", "llama_server", "mcp")
HTTPSERVER: dict[str, set[str]] = {
    "moeserve.httpserver.transport": {
        "moeserve.config",
        "moeserve.errors",
        "moeserve.messages.refusal",  # which an error carries, here and from the router
        "moeserve.processes.listeners",
        "moeserve.processes.logs",
    },
    "moeserve.httpserver.observability": {
        "moeserve.httpserver.transport",
        "moeserve",
        "moeserve.messages",
        "moeserve.processes.tracing",
    },
    "moeserve.httpserver.generation": FRAME
    | {
        "moeserve.httpserver.transport",
        "moeserve.httpserver.observability",
        "moeserve.models.facts",
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
            "moeserve.sampling",
            "moeserve.chatformat",
            "moeserve.grammar.spec",
            "moeserve.models.facts",
            "moeserve",
        }
        for api in HTTP_APIS
    },
    "moeserve.httpserver.ollama": {
        "moeserve.httpserver.generation",
        "moeserve.httpserver.transport",
        "moeserve.config",
        "moeserve.errors",
        "moeserve.messages",
        "moeserve.sampling",
        "moeserve.chatformat",
        "moeserve.grammar.spec",
        "moeserve.models.facts",
        "moeserve.processes.lifecycle",  # a download is a process of its own
        "moeserve",
    },
    "moeserve.httpserver.native": {
        "moeserve.models.adapters.modules",
        "moeserve.httpserver.generation",
        "moeserve.httpserver.transport",
        "moeserve.messages",
        "moeserve.placement.heat",
        "moeserve",
    },
}

# The models of a front, without processes and HTTP.
FRONT_POOL = {
    *(f"moeserve.front.{module}" for module in ("config", "lives", "memory", "pooled_model", "schedule")),
    "moeserve.httpserver.transport.errors",
    "moeserve.messages.refusal",
}

# What each package may import of ours, besides itself. What is not listed here may import anything of ours.
ALLOWED: dict[str, set[str]] = {
    "moeserve.messages": {"moeserve.sampling"},
    "moeserve.sampling": set(),
    "moeserve.errors": set(),
    "moeserve.config": set(),
    "moeserve.processes": {"moeserve", "moeserve.config", "moeserve.errors", "moeserve.messages"},
    "moeserve.quantization": set(),
    "moeserve.router.core": {"moeserve.messages", "moeserve.sampling"},
    "moeserve.router": FRAME | {"moeserve.models.adapters.modules"},
    "moeserve.detokenizer": FRAME
    | {"moeserve.tokenizer", "moeserve.models.open", "moeserve.models.registry"},
    "moeserve.httpserver": FRAME
    | {
        "moeserve.models.adapters.modules",
        "moeserve.tokenizer",
        "moeserve.models.errors",
        "moeserve.models.facts",
        "moeserve.models.open",
        "moeserve.models.sources.source",
        "moeserve.grammar",
        "moeserve.chatformat",
        "moeserve.placement.heat",
    },
    **HTTPSERVER,
    "moeserve.tokenizer": {
        *MODEL_FILES,
        "moeserve.errors",
        "moeserve.processes.sandbox",
        "moeserve.chatformat",  # whose tags are tokens
    },
    "moeserve.grammar": {
        "moeserve.tokenizer",
        "moeserve.models.open",
        "moeserve.errors",
        "moeserve.processes.sandbox",
    },
    "moeserve.chatformat": set(),
    "moeserve.processes.sandbox": {"moeserve.errors", "moeserve.processes.process_state"},
    "moeserve.models.sources.gguf": {
        "moeserve.models.sources.experts_in_file",
        "moeserve.errors",
        "moeserve.models.errors",
        "moeserve.models.sources.model_files",
        "moeserve.models.sources.regular_file",
        "moeserve.quantization",
    },
    "moeserve.models.sources.huggingface": {
        "moeserve.errors",
        "moeserve.models.errors",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.model_files",
        "moeserve.models.sources.splits",
        "moeserve.models.sources.regular_file",
        "moeserve.quantization",
    },
    "moeserve.models.attention": {
        "moeserve.models.compressed",
        "moeserve.models.indexer",
        "moeserve.models.latent",
        "moeserve.models.sources.gguf",
    },
    "moeserve.models.feed_forward": KERNEL_OPTIONS | {"moeserve.models.sources.gguf"},
    "moeserve.models.interface": READERS
    | {
        "moeserve.models.attention",
        "moeserve.models.column_orders",
        "moeserve.models.feed_forward",
        "moeserve.models.indexer",
        "moeserve.models.latent",
        "moeserve.models.recurrence",
        "moeserve.models.residual",
        "moeserve.models.rope_scaling",
    },
    "moeserve.models.column_orders": {"moeserve.models.sources.source"},
    "moeserve.models.compressed": {"moeserve.models.latent", "moeserve.models.sources.gguf"},
    "moeserve.models.indexer": {"moeserve.kernels.choice_rule", "moeserve.models.sources.gguf"},
    "moeserve.models.latent": {"moeserve.models.indexer", "moeserve.models.sources.gguf"},
    "moeserve.models.mamba2": {"moeserve.kernels.mamba2.heads", "moeserve.models.sources.gguf"},
    "moeserve.models.short_conv": {"moeserve.kernels.short_conv.heads", "moeserve.models.sources.gguf"},
    "moeserve.models.recurrence": {
        "moeserve.kernels.delta_net.heads",
        "moeserve.models.mamba2",
        "moeserve.models.short_conv",
        "moeserve.models.sources.gguf",
    },
    "moeserve.models.recurrent_heads": {
        "moeserve.kernels.delta_net.heads",
        "moeserve.kernels.mamba2.heads",
        "moeserve.kernels.short_conv.heads",
        "moeserve.models.mamba2",
        "moeserve.models.shape_reader",
        "moeserve.models.short_conv",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.source",
    },
    "moeserve.models.residual": {"moeserve.kernels.ngrams.hashing", "moeserve.models.sources.gguf"},
    "moeserve.models.rope_scaling": set(),
    "moeserve.models.tensors": {
        "moeserve.models.errors",
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.latent",
        "moeserve.models.recurrence",
        "moeserve.models.residual",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.source",
        "moeserve.quantization",
    },
    "moeserve.models.sources.model_files": set(),
    "moeserve.models.neutral_settings": set(),
    "moeserve.models.shape_reader": READERS
    | {
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.neutral_settings",
        "moeserve.models.rope_scaling",
        "moeserve.kernels.routing.options",
    },
    "moeserve.models.skipped_layers": {
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.source",
    },
    "moeserve.models.cpu_step_buffers": {
        "moeserve.models.column_orders",
        "moeserve.models.compressed",
        "moeserve.models.indexer",
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.latent",
        "moeserve.models.mamba2",
        "moeserve.models.recurrence",
        "moeserve.models.residual",
        "moeserve.models.short_conv",
        "moeserve.models.step_buffers",
    },
    "moeserve.models.step_buffers": {
        "moeserve.kernels.delta_net.heads",
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.indexer",
        "moeserve.models.interface",
        "moeserve.models.latent",
        "moeserve.models.mamba2",
        "moeserve.models.recurrence",
        "moeserve.kernels.linear.integer_pieces",
        "moeserve.models.residual",
        "moeserve.kernels.choice_rule",
    },
    "moeserve.models.qwen_hybrid": FAMILY_NEEDS,
    **{family: FAMILY_NEEDS | {"moeserve.models.qwen_hybrid"} for family in FAMILIES},
    "moeserve.kv": {
        "moeserve.config",
        "moeserve.errors",
        "moeserve.models.compressed",
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.latent",
        "moeserve.kernels.host_pinning",
        "moeserve.kernels.pages",
        "moeserve.kernels.stream_operands",
        "moeserve.config.units",
    },
    "moeserve.models.adapters": {
        "moeserve.errors",
        "moeserve.models.errors",
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.registry",  # what of checkpoints no shape says
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.huggingface",
    },
    "moeserve.models": {"moeserve.kernels", "moeserve.errors", "moeserve.quantization"},
    "moeserve.models.ranks.rank_share": {
        "moeserve.models.gpu_features",
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.sources.gguf",
        "moeserve.models.tensors",
    },
    "moeserve.placement": {
        "moeserve.models.sources.gguf",
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.ranks.rank_share",
        "moeserve.models.residual",
        "moeserve.models.tensors",
        "moeserve.models.cpu_step_buffers",
        "moeserve.models.step_buffers",
        "moeserve.kv.capacity",
        "moeserve.kv.layout",
        "moeserve.kv.state_capacity",
        "moeserve.kv.window_capacity",
        "moeserve.kv.tier_sizes",
        "moeserve.config",
        "moeserve.errors",
        "moeserve.config.units",
    },
    "moeserve.kernels": {"moeserve.errors", "moeserve.quantization", "moeserve.sampling"},
    "moeserve.remote": FRAME
    | {
        "moeserve.models.adapters.modules",
        "moeserve.models.open",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.source",
    },
    "moeserve.remote.worker": {"moeserve.processes.lifecycle", "moeserve.worker.__main__"},
    "moeserve.cli.remote_worker": FRAME
    | {
        "moeserve.launcher",
        "moeserve.models.open",
        "moeserve.cli.command_line",
        "moeserve.remote",
    },
    "moeserve.remote.host": FRAME | {"moeserve.launcher", "moeserve.remote"},
    "moeserve.hub": {
        "moeserve.errors",
        "moeserve.models.sources.huggingface",
        "moeserve.models.sources.model_files",
        "moeserve.models.registry",
    },
    "moeserve.worker": FRAME
    | {
        "moeserve.kv",
        "moeserve.models",
        "moeserve.kernels",
        "moeserve.quantization",
        "moeserve.placement",
        "moeserve.tokenizer",
        "moeserve.grammar",
    },
    "moeserve.visualserver": FRAME
    | {
        "moeserve.models.errors",
        "moeserve.models.attention",
        "moeserve.models.feed_forward",
        "moeserve.models.interface",
        "moeserve.models.open",
        "moeserve.models.registry",
        "moeserve.models.sources.gguf",
        "moeserve.models.sources.huggingface",
        "moeserve.models.loading.floats",
        "moeserve.models.sources.source",
        "moeserve.placement.engine_memory",
        "moeserve.worker.loading.device",  # the same GPU as the worker's
    },
    "moeserve.cli.compare_dumps": {"moeserve.errors", "moeserve.worker.recording.dump_format"},
    "moeserve.launcher.zygote": FRAME
    | {"moeserve.router.__main__", "moeserve.detokenizer.__main__", "moeserve.tokenizer"},
    "moeserve.launcher.zygote.forking": {"moeserve.processes.lifecycle"},
    "moeserve.launcher.zygote.client": FRAME | {"moeserve.launcher.child_process"},
    "moeserve.cli.run": {
        "moeserve.cli.background_server",
        "moeserve.cli.command_line",
        "moeserve.cli.running_server",
        "moeserve.config",
        "moeserve.errors",
        "moeserve.sampling.parameters",
    },
    "moeserve.cli.workload": {"moeserve.errors"},
    "moeserve.placement.expert_cache": {"moeserve.errors"},
    "moeserve.cli.simulate": FRAME
    | {
        "moeserve.cli.workload",
        "moeserve.router",
        "moeserve.cli.command_line",
        "moeserve.placement.step_tokens",
    },
    "moeserve.launcher": FRAME,
    "moeserve.launcher.exit_codes": set(),
    # What decides is pure; what answers knows of HTTP; the launchers know the launcher.
    "moeserve.front.memory": {"moeserve.config.units"},
    "moeserve.front.schedule": {"moeserve.front.memory"},
    "moeserve.front.config": {"moeserve.config", "moeserve.errors"},
    **{f"moeserve.front.{module}": FRONT_POOL for module in ("pooled_model", "lives", "pool")},
    "moeserve.front.model_launcher": FRAME | {"moeserve.launcher"},
    "moeserve.front.launch": FRAME | {"moeserve.front.config", "moeserve.launcher"},
    "moeserve.front": FRAME | {"moeserve.httpserver", "moeserve.launcher.child_process"},
}
