"""Names of calls of operators, each of which compiles what it would launch (compile_for_gpu.py)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from moeserve.kernels.linear.large_batch import FEW_BLOCK
from moeserve.quantization import StoredScales
from moeserve.quantization.table import (
    BF16,
    F32,
    FP8_TYPES,
    IQ1_M,
    IQ1_S,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    MXFP4,
    NVFP4_TYPES,
    Q1_0,
    Q2_0,
    Q3_K,
    Q5_K,
    Q8_0,
    TQ1_0,
    TQ2_0,
    ZERO_TYPES,
)
from tests.support.measuring.gpu_operators.attention import (
    FALCON,
    attention,
    attention_of_fp8,
    attention_of_others,
    attention_of_q8_0,
    attention_of_two_widths,
    attention_with_pictures,
    delta_net,
    kimi_delta,
    latent_attention,
    mamba_2,
    piecewise,
    recurrent_drafts,
    short_convolution,
    wide_attention,
)
from tests.support.measuring.gpu_operators.compressed import compressed, experts_by_token
from tests.support.measuring.gpu_operators.indexer import block_indexer, indexer, pooled_indexer
from tests.support.measuring.gpu_operators.layer_inputs import layer_inputs
from tests.support.measuring.gpu_operators.next_token import drafts
from tests.support.measuring.gpu_operators.products import (
    adapters,
    exact,
    experts,
    gated_rows,
    integers,
    large_batch,
    linear,
    panels,
    quads,
)
from tests.support.measuring.gpu_operators.rows import (
    hand_off,
    over_gpus,
    pages,
    pointwise_kernels,
    promotions,
    rows,
    rows_of_others,
    sampling,
    sandwiched,
    tower,
)
from tests.support.measuring.gpu_operators.streams import (
    attended_streams,
    hyper_connections,
    mixed_streams,
    ngram_embeddings,
)
from tests.support.measuring.gpu_operators.tensors import IQ4, Q4, Q6, f32

INT4 = ZERO_TYPES[4, 32, StoredScales.BF16_ZERO]
FP8, NVFP4 = FP8_TYPES[128], NVFP4_TYPES[256]
INT8 = ZERO_TYPES[8, 128, StoredScales.F16_ZERO]
INT2, INT3 = (ZERO_TYPES[bits, 64, StoredScales.F16_ZERO] for bits in (2, 3))
CALLS: dict[str, list[Callable[[], None]]] = {
    "compressed attention": [
        partial(compressed, 4, f32),
        partial(compressed, 100, torch.bfloat16),
        partial(experts_by_token, 4),
        partial(experts_by_token, 1024),
    ],
    "linear, few": [
        partial(linear, 4, Q4, 512, 96, Q6, 32),
        partial(linear, 8, Q4, 512, 96, Q6, 32),
        partial(linear, 8, Q4, 2048, 96, Q6, 32),
        partial(linear, 8, Q6, 4096, 96, Q4, 32),
        partial(linear, 5, Q6, 2048, 96, None, 0),
    ],
    "linear, wide": [partial(linear, 4, Q4, 4352, 4096, Q6, 32)],
    "linear, many": [partial(linear, 200, Q4, 512, 96, Q6, 32)],
    "linear, looked up": [partial(linear, 20, IQ4, 512, 96, None, 0)],
    "linear, floats": [partial(linear, 2, F32, 512, 96, None, 0), partial(linear, 20, F32, 512, 96, F32, 32)],
    "gated rows": [gated_rows],
    "linear, exact": [partial(exact, 600)],
    "experts, one": [partial(experts, 1, Q4, Q6)],
    "experts, two": [partial(experts, 2, Q4, Q6)],
    "experts, few": [partial(experts, 16, Q4, Q6)],
    "experts, some": [partial(experts, 30, Q4, Q6)],
    "experts, 128 and 256": [partial(experts, 128, Q4, Q6), partial(experts, 256, Q4, Q3_K)],
    "experts by integers": [
        partial(integers, 8),
        partial(integers, 16),
        partial(integers, 128),
        partial(integers, 1024),
        partial(integers, 8, Q6),
        partial(integers, 32, Q6),
        partial(integers, 128, Q6),
        partial(integers, 1024, Q6),
    ],
    "experts by quads": [partial(quads, 256, Q4, Q6), partial(quads, 2048, Q6, Q4)],
    "experts, many": [partial(experts, 2000, Q4, Q6)],
    "experts and linear, unpacked": [
        partial(large_batch, 4096, Q4, Q6),
        partial(large_batch, 4096, BF16, BF16),
    ],
    "codebooks, few": [
        partial(linear, 4, IQ2_XXS, 512, 96, IQ1_S, 32),
        partial(experts, 1, IQ3_XXS, IQ2_S),
        partial(experts, 4, IQ2_XS, IQ1_M),
        partial(rows, 3, IQ3_S),
    ],
    "codebooks, many": [
        partial(linear, 200, IQ3_S, 512, 96, Q6, 32),
        partial(experts, 30, IQ2_XXS, IQ1_M),
        partial(experts, 256, IQ2_S, IQ1_S),
        partial(large_batch, 4096, IQ3_XXS, IQ2_XS),
        partial(large_batch, 64, IQ3_XXS, IQ2_XS, FEW_BLOCK),
    ],
    "base-3 digits": [
        partial(linear, 4, TQ1_0, 512, 96, TQ1_0, 32),
        partial(experts, 1, TQ1_0, TQ1_0),
        partial(experts, 30, TQ1_0, TQ1_0),
        partial(large_batch, 4096, TQ1_0, TQ1_0),
        partial(rows, 3, TQ1_0),
        partial(panels, TQ1_0, INT2, INT3),
    ],
    "wide scales": [
        partial(linear, 4, TQ2_0, 512, 96, Q1_0, 32),
        partial(experts, 4, Q2_0, INT4),
        partial(experts, 30, TQ2_0, INT8),
        partial(linear, 4, INT2, 512, 96, INT3, 32),
        partial(experts, 30, INT3, INT2),
        partial(large_batch, 4096, Q1_0, INT4),
        partial(rows, 3, Q1_0),
    ],
    "8-bit floats": [
        partial(linear, 4, FP8, 512, 96, NVFP4, 32),
        partial(linear, 200, FP8, 512, 96, Q6, 32),
        partial(experts, 4, FP8, NVFP4),
        partial(experts, 30, NVFP4, FP8),
        partial(large_batch, 4096, FP8, NVFP4),
        partial(rows, 3, FP8),
    ],
    "rows": [partial(rows, 3, Q4)],
    "norms behind blocks": [partial(sandwiched, 3), partial(experts, 2, Q4, Q6, activation="gelu")],
    "rows, looked up": [partial(rows, 3, IQ4)],
    "a vision tower's layers": [partial(tower, 8, "tanh"), partial(tower, 5, "none")],
    "attention": [partial(attention, 3)],
    "attention in equal shares": [partial(attention, 1), partial(attention, 40), partial(wide_attention, 40)],
    "attention with pictures": [partial(attention_with_pictures, 40)],
    "linear, bias": [
        partial(linear, 4, Q4, 512, 96, Q6, 32, bias=True),
        partial(linear, 20, Q4, 512, 96, Q6, 32, bias=True),
    ],
    "linear, bias, many": [
        partial(linear, 200, Q4, 512, 96, Q6, 32, bias=True),
        partial(linear, 2, F32, 512, 96, F32, 32, bias=True),
    ],
    "experts, gpt-oss, few": [partial(experts, 2, MXFP4, MXFP4, oai=True)],
    "experts, gpt-oss, some": [partial(experts, 30, MXFP4, MXFP4, oai=True)],
    "experts, gpt-oss, many": [partial(experts, 2000, MXFP4, MXFP4, oai=True)],
    "experts, shared": [
        partial(experts, 2, Q4, Q6, experts=1, top_k=1),
        partial(experts, 30, Q4, Q6, experts=1, top_k=1),
    ],
    "rows of other families": [partial(rows_of_others, 3)],
    "attention of other families": [partial(attention_of_others, 3), partial(attention_of_two_widths, 3)],
    "delta net, few": [partial(delta_net, 3, f32, False)],
    "Kimi delta": [partial(kimi_delta, 3, f32), partial(kimi_delta, 200, torch.bfloat16)],
    "Mamba-2, wide states": [
        partial(mamba_2, 3, f32, False, FALCON),
        partial(mamba_2, 3, f32, True, FALCON),
        partial(mamba_2, 200, torch.bfloat16, True, FALCON),
    ],
    "Mamba-2": [partial(mamba_2, 3, f32, False), partial(mamba_2, 3, f32, True)],
    "Mamba-2, many": [
        partial(mamba_2, 200, torch.bfloat16, False),
        partial(mamba_2, 200, torch.bfloat16, True),
    ],
    "drafts of recurrent layers": [partial(recurrent_drafts, f32), partial(recurrent_drafts, torch.bfloat16)],
    "short convolution": [
        partial(short_convolution, 3, f32),
        partial(short_convolution, 200, torch.bfloat16),
    ],
    "hyper-connections and n-grams": [
        *(partial(each, 3, f32) for each in (hyper_connections, ngram_embeddings)),
        *(partial(each, 200, torch.bfloat16) for each in (hyper_connections, ngram_embeddings)),
    ],
    "streams that are attended to": [
        partial(attended_streams, 3, f32),
        partial(attended_streams, 200, torch.bfloat16),
    ],
    "streams that are mixed": [partial(mixed_streams, 3, f32), partial(mixed_streams, 200, torch.bfloat16)],
    "inputs of layers": [partial(layer_inputs, 3, f32), partial(layer_inputs, 200, torch.bfloat16)],
    "delta net, many": [partial(delta_net, 200, torch.bfloat16, True)],
    "delta net, many, floats": [partial(delta_net, 200, f32, True)],
    "attention of q8_0 keys": [partial(attention_of_q8_0, 3)],
    "attention of fp8 keys": [partial(attention_of_fp8, 3)],
    "attention of wide heads": [partial(wide_attention, 3)],
    "latent attention, few": [partial(latent_attention, 3, f32)],
    "indexer, few": [partial(indexer, 3, f32)],
    "indexer of blocks": [partial(block_indexer, 3, f32)],
    "indexer of pooled keys": [partial(pooled_indexer, 3, f32), partial(pooled_indexer, 200, torch.bfloat16)],
    "indexer, many": [partial(indexer, 200, torch.bfloat16)],
    "latent attention, many": [partial(latent_attention, 200, torch.bfloat16)],
    "sampling": [partial(sampling, 2)],
    "drafts": [partial(drafts, 1, Q6), partial(drafts, 4, Q8_0), partial(drafts, 2, BF16)],
    "pointwise": [pointwise_kernels],
    "piecewise attention": [partial(piecewise, torch.bfloat16, 128)],
    "piecewise attention, wide": [partial(piecewise, torch.float16, 256)],
    "piecewise attention, floats": [partial(piecewise, f32, 80)],
    "sums over GPUs": [partial(over_gpus, f32), partial(over_gpus, torch.bfloat16)],
    "adapters, few rows": [partial(adapters, 8, f32)],
    "adapters, many rows": [partial(adapters, 2000, torch.bfloat16)],
    "pages": [partial(pages, 1024), partial(pages, 6)],
    "promotions": [promotions, partial(hand_off, 4)],
    "panels": [
        partial(panels, Q4, Q6, IQ4, Q3_K, Q5_K, Q8_0, IQ2_XXS, IQ2_S, IQ3_S, IQ1_M, TQ2_0, Q1_0, INT4, INT8)
    ],
}
# Of those, what tests ask for by itself.
FEWER: dict[str, list[Callable[[], None]]] = {
    "experts, 128 and 256, of k-quants": [partial(experts, 128, Q4, Q6), partial(experts, 256, Q4, Q6)],
    "experts, 256": [partial(experts, 256, Q4, Q6)],
}
