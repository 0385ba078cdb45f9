"""What the packages of models may import: parts of the table in import_rules.py."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "moeserve"

# One package an architecture; `models.registry` alone may name them.
FAMILIES = {f"moeserve.models.{path.parent.name}" for path in (PACKAGE / "models").glob("*/family.py")}

# What a model is loaded from, and what may be known of it; none of it knows torch.
MODEL_FILES = {
    "moeserve.models.errors",
    "moeserve.models.sources.gguf",
    "moeserve.models.sources.huggingface",
    "moeserve.models.sources.announced_size",
    "moeserve.models.sources.experts_in_file",
    "moeserve.models.sources.first_bytes",
    "moeserve.models.sources.model_files",
    "moeserve.models.sources.splits",
    "moeserve.models.sources.regular_file",
    "moeserve.models.sources.source",
    "moeserve.models.gpu_features",
    "moeserve.models.attention",
    "moeserve.models.buffers",
    "moeserve.models.feed_forward",
    "moeserve.models.interface",
    "moeserve.models.clamped_ffns",
    "moeserve.models.column_orders",
    "moeserve.models.compressed",
    "moeserve.models.compressed_buffers",
    "moeserve.models.indexer",
    "moeserve.models.latent",
    "moeserve.models.integer_buffers",
    "moeserve.models.latent_expert_buffers",
    "moeserve.models.layer_input_buffers",
    "moeserve.models.mamba2",
    "moeserve.models.recurrence",
    "moeserve.models.latent_heads",
    "moeserve.models.recurrent_heads",
    "moeserve.models.residual",
    "moeserve.models.residual_buffers",
    "moeserve.models.rope_scaling",
    "moeserve.models.neutral_settings",
    "moeserve.models.open",
    "moeserve.models.registry",
    "moeserve.models.deepstack",
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
    "moeserve.models.sources.huggingface.head_norms",
    "moeserve.models.sources.huggingface.layer_settings",
    "moeserve.models.sources.huggingface.experts_by_token",
    "moeserve.models.sources.huggingface.fused_qkv",
    "moeserve.models.sources.huggingface.fused_rows",
    "moeserve.models.sources.huggingface.latent",
    "moeserve.models.sources.huggingface.llama3_rope",
    "moeserve.models.sources.huggingface.longrope",
    "moeserve.models.sources.huggingface.mamba2",
    "moeserve.models.sources.huggingface.mapping",
    "moeserve.models.sources.huggingface.multipliers",
    "moeserve.models.sources.huggingface.next_token_names",
    "moeserve.models.sources.huggingface.proportional_rope",
    "moeserve.models.sources.huggingface.remade",
    "moeserve.models.sources.huggingface.rope_by_kind",
    "moeserve.models.sources.huggingface.sharded_table",
    "moeserve.models.sources.source",
    "moeserve.quantization",
}
FAMILY_NEEDS = READERS | {
    "moeserve.models.short_conv",
    "moeserve.models.clamped_ffns",
    "moeserve.models.next_token_layers",
    "moeserve.models.compressed",
    "moeserve.models.indexer",
    "moeserve.models.attention",
    "moeserve.models.feed_forward",
    "moeserve.models.interface",
    "moeserve.models.latent",
    "moeserve.models.recurrence",
    "moeserve.models.latent_heads",
    "moeserve.models.recurrent_heads",
    "moeserve.models.residual",
    "moeserve.models.rope_scaling",
    "moeserve.models.shape_reader",
    "moeserve.kernels.choice_rule",
    "moeserve.kernels.ngrams.hashing",
    "moeserve.kernels.routing.options",
}
