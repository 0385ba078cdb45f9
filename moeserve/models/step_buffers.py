"""The buffers of a step on a GPU, as data: engines allocate them, placement and plan count their bytes. No torch.
`cpu_step_buffers.py` has the CPU's.

A buffer's shape follows from the model's shape and the rows of the largest step; the allocating engine decides
where it is.
"""

from __future__ import annotations

from dataclasses import replace

from moeserve.kernels.choice_rule import stride_of_choice
from moeserve.kernels.delta_net.heads import DELTA_CHUNK
from moeserve.models.attention import AttentionShape
from moeserve.models.buffers import BYTES, Buffer, GpuFloat, activation_buffers, arena_bytes
from moeserve.models.column_orders import ColumnOrders
from moeserve.models.compressed_buffers import (
    compressed_buffers,
    compressed_input_width,
    compressed_numbers,
)
from moeserve.models.head_shortlist import most_panels
from moeserve.models.indexer import BlockIndexerShape, IndexerShape
from moeserve.models.integer_buffers import dense_integer_buffers, integer_rows
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.latent_expert_buffers import latent_expert_buffers
from moeserve.models.layer_input_buffers import layer_input_buffers
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import GatedDeltaNetShape
from moeserve.models.residual import HyperConnections
from moeserve.models.residual_buffers import ngram_buffers, stream_buffers

GPU_LOGIT_ROWS = 256  # rows of logits per head call on a GPU: 156 MB with a vocabulary of 151,936

# In GPU steps of up to this number of rows, products take int8 activations (kernels/linear), and each route
# computes its expert separately (kernels/experts). For 16 rows the other kernels are 1.05 to 1.4 times as fast, for
# 8 rows no faster (docs/results/gpu-kernels.md).
SMALL_BATCH_ROWS = 8
# Steps of up to this number of rows keep values between two products in float32, at no cost. Larger steps round
# them, except with float weights, where the rounding would be much of the error (BF16, a whole prompt: 5.6e-5 from
# the exact result, where llama.cpp is at 3.6e-5: docs/results/accuracy.md).
FLOAT32_ROWS = 64
# Steps of more rows than this unpack attention's quantised matrices to floats, each before its product
# (kernels/linear/large_batch). Steps of more than UNPACK_ROWS rows unpack all matrices, several experts at a time: the
# scratch grows with the rows, like the other buffers. Measured in docs/results/gpu-kernels.md.
UNPACK_DENSE_ROWS = 64
UNPACK_ROWS = 1024
UNPACK_BYTES_OF_ROW = 32 << 10
UNPACK_ROUTES = 192  # average routes per expert from which unpacking its weights pays
# Steps of this number of rows multiply experts by warpgroup instructions, if the matrices' types allow it
# (kernels/experts/quads.py; docs/results/gpu-kernels.md). Steps of 4,096 are faster too, but less accurate.
QUAD_ROWS = range(129, 2049)
# Steps of more rows than this use the unpacked experts (--unpacked-experts), also where too few routes per expert would
# not pay for unpacking them in the step (docs/results/gpu-engine.md).
UNPACKED_EXPERTS_ROWS = 512
# Steps of this number of rows multiply experts with weights as integers in float16, if the matrices' types allow it
# (kernels/experts/integers.py; docs/results/gpu-kernels.md).
INTEGER_ROWS = range(9, 1025)
SIX_BIT_ROWS = 256  # for down in Q6_K; from there on the method of QUAD_ROWS is as fast or faster
# Drafts per step in models with recurrent state: 64 KB each in each of Qwen3.6-35B-A3B's 30 recurrent layers.
MOST_STATE_DRAFTS = 64
NEXT_TOKEN_ROWS = 512  # rows whose keys and values the next-token block computes together
CHAIN_ROWS = 64  # requests for which it drafts together
CHAIN_NUMBERS = 13  # uploaded once for each row of a chain, the first columns of `ChainColumns`
# Scores of index keys that a GPU holds at once, 128 MiB: longer prompts choose keys for some of their rows at a time.
# Room for LEAST_SCORED_ROWS rows at least.
GPU_INDEX_SCORES = 1 << 25
LEAST_SCORED_ROWS = 16


def unpacks_experts(rows: int, top_k: int, experts: int) -> bool:
    """Returns whether a step of `rows` rows unpacks experts."""
    return rows > UNPACK_ROWS and rows * top_k >= UNPACK_ROUTES * experts


def gpu_state_drafts(model: ModelShape, max_num_seqs: int, drafts: int) -> int:
    """Returns the maximum number of drafts per GPU step whose state changes recurrent layers record, with up to
    `drafts` per request; 0 without recurrent layers."""
    if model.recurrence is None:
        return 0
    return min(max_num_seqs * drafts, MOST_STATE_DRAFTS)


def gpu_draft_records(model: ModelShape, drafts: int) -> Buffer:
    """Returns the buffer in which a recurrent layer records `drafts` drafts' changes of its states."""
    assert model.recurrence is not None
    return Buffer("state_drafts", (drafts, model.recurrence.heads.pending_values))


def next_token_shape(model: ModelShape) -> ModelShape:
    """Returns the model's shape with the next-token block as its only layer."""
    assert model.next_token_layer is not None
    return replace(model, layers=(model.next_token_layer,), next_token_layer=None, deep_layers=0)


def next_token_bytes(
    model: ModelShape, max_tokens: int, max_num_seqs: int, drafts: int, floats: GpuFloat
) -> int:
    """Returns the bytes of a GPU's next-token block beside weights and KV."""
    return drafting_bytes(next_token_shape(model), max_tokens, max_num_seqs, drafts, floats)


def drafting_bytes(own: ModelShape, max_tokens: int, max_num_seqs: int, drafts: int, floats: GpuFloat) -> int:
    """Returns the bytes on a GPU of a layer that drafts, beside weights and KV: its step buffers, the states of a
    step's rows and of the requests, the joined inputs, and the chains' rows. own: the layer as a model."""
    rows = min(step_sizes(max_tokens)[-1], NEXT_TOKEN_ROWS)
    arenas = (gpu_arena_bytes(own, rows, floats, float_weights=of_floats) for of_floats in (False, True))
    hidden, chain = own.hidden_size, min(step_sizes(max_num_seqs)[-1], CHAIN_ROWS)
    states = step_sizes(max_tokens)[-1] + max_num_seqs + 1 + chain
    panels = most_panels(own.vocab_size)
    chain_bytes = 4 * chain_numbers(chain, drafts, panels, chain_sections(own)) + 8 * chain * drafts
    inputs = product_input_bytes(rows, 2 * hidden, floats)
    return max(arenas) + 4 * hidden * states + 8 * hidden * rows + inputs + chain_bytes


def chain_numbers(rows: int, depths: int, panels: int, sections: int) -> int:
    """Returns how many int32s are uploaded for a chain of `depths` drafts: for each of `rows` rows CHAIN_NUMBERS, the
    KV slots of its drafts, the places of the tokens before it and the KV slots from there on; their `sections` RoPE
    positions at first and at each depth; and a shortlist's panels. See `ChainColumns`."""
    return rows * (CHAIN_NUMBERS + depths + (1 + depths) + 2 * depths + sections * (1 + depths)) + panels


def chain_sections(model: ModelShape) -> int:
    """Returns how many RoPE positions a row of a chain has beside its number; 0 if none."""
    return 0 if model.rope_sections is None else len(model.rope_sections)


def product_input_bytes(most_rows: int, cols: int, floats: GpuFloat) -> int:
    """Returns the bytes of the inputs of a product, for each size of steps up to `most_rows` rows."""
    total = 0
    for rows in step_sizes(most_rows):
        small = rows <= SMALL_BATCH_ROWS
        acts = activation_buffers("", rows, cols, "float32" if small else floats, quantised=small)
        total += sum(buffer.nbytes for buffer in acts)
    return total


def step_sizes(max_tokens: int) -> list[int]:
    """Returns the sizes to which a GPU step's rows are rounded up: powers of two. Kernels skip the padding, so
    rounding costs little. Kernels are compiled, and graphs captured, once per size."""
    sizes = [1]
    while sizes[-1] < max_tokens:
        sizes.append(2 * sizes[-1])
    return sizes


def gpu_step_buffers(
    model: ModelShape,
    rows: int,
    floats: GpuFloat,
    *,
    float_weights: bool,
    adapter_rank: int = 0,
    length: int | None = None,
) -> tuple[Buffer, ...]:
    """Returns the buffers of a GPU step of up to `rows` rows. floats: dtype that the tensor cores multiply.
    float_weights: attention or experts are not quantised. adapter_rank: largest rank of LoRA adapters; 0: no
    adapters. length: positions of the longest request, on which an indexer's buffers depend; None: the model's
    context."""
    wide: GpuFloat = "float32" if rows <= FLOAT32_ROWS or float_weights else floats
    small = rows <= SMALL_BATCH_ROWS
    acts = "float32" if small else floats
    hidden, top_k = model.hidden_size, model.top_k
    routes = model.num_parts  # the feed-forward that all tokens pass is one more route
    recurrence = model.recurrence
    latent = model.latent
    attending = [layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionShape)]
    gates = max((a.gate_width for a in attending if a.has_gate_matrix), default=0)
    of_attention = (
        model.q_rows + gates + model.kv_width + model.value_width if latent is None else latent.input_width
    )
    compressed = compressed_input_width(model)
    projected = compressed or max(of_attention, 0 if recurrence is None else recurrence.input_width)
    buffers = [
        Buffer("x", (rows, model.residual_width)),  # the residual
        *activation_buffers("y", rows, hidden, acts, quantised=small),  # norm of x
        # q, k and v, or a recurrent layer's input products; compressed attention's gates are exponents.
        Buffer("projected", (rows * projected,), "float32" if compressed else wide),
        Buffer("q", (rows, model.q_width if latent is None else latent.latent_width), "float16"),
        *activation_buffers("attended", rows, model.mixed_width, acts, quantised=small),
        Buffer("output", (rows, 1, hidden), wide),  # output of the mixer
        Buffer("router_logits", (rows, model.num_experts)),
        Buffer("expert_ids", (rows, routes), "int32"),
        Buffer("local_expert_ids", (rows, routes), "int32"),  # index among the experts on this GPU
        Buffer("streamed_expert_ids", (rows, routes), "int32"),  # index among the streamed experts
        Buffer("route_weights", (rows, routes)),
        *activation_buffers("h", rows * top_k, model.expert_width, acts, quantised=small),
        # Outputs of the experts on this GPU: with few rows one sum per token, with many rows one part per route.
        Buffer("parts", (rows, 1 if small or model.latent_expert_width else routes, hidden), wide),
        Buffer("pool_sum", (rows, hidden)),  # sum of the RAM experts' outputs; of latent experts, of all
    ]
    if rows in QUAD_ROWS and not float_weights:
        # The experts' input in quad order.
        buffers.append(Buffer("quads", (rows, model.experts_input_width), floats))
    if rows in INTEGER_ROWS and not float_weights:
        buffers += integer_rows("integer_x", rows, model.experts_input_width)
        buffers += integer_rows("integer_h", rows * top_k, model.expert_width)
    if not float_weights:
        buffers += dense_integer_buffers(model, rows)
    weighs_input = any(layer.moe is not None and layer.moe.weighs_input for layer in model.layers)
    if model.is_sandwiched or weighs_input:
        buffers += activation_buffers("experts_input", rows, hidden, acts, quantised=small)
    if weighs_input:
        # The routes' weights; the routes then have weight 1.
        buffers.append(Buffer("input_weights", (rows, 1)))
    if model.is_sandwiched or not small:
        # y in float32. The router's product is the most sensitive to rounding, which can send a token to another
        # expert (BF16, a whole prompt: 4.6e-5 from the exact result with rounded y).
        buffers.append(Buffer("router_input", (rows, hidden)))
    if isinstance(recurrence, Mamba2Shape):
        buffers.append(Buffer("mamba2_mixed", (rows, recurrence.heads.channels), wide))  # x, B, C convolved
    elif isinstance(recurrence, GatedDeltaNetShape):
        buffers += _delta_net_buffers(recurrence, rows, wide)
        if recurrence.gate_rank:
            buffers += activation_buffers("delta_low_rank", rows, recurrence.gate_rank, acts, quantised=small)
    if rows > UNPACK_ROWS:
        room = rows * UNPACK_BYTES_OF_ROW // BYTES[floats]
        buffers.append(Buffer("unpack_scratch", (_scratch_numbers(model, projected, room),), floats))
    elif rows > UNPACK_DENSE_ROWS and not float_weights:
        buffers.append(Buffer("unpack_scratch", (_dense_numbers(model, projected),), floats))
    if latent is not None:
        buffers += _latent_buffers(latent, rows, wide, floats)
        if latent.q_rank:
            buffers += activation_buffers("q_a", rows, latent.q_rank, acts, quantised=small)
    if model.indexer is not None:
        buffers += _indexer_buffers(model.indexer, rows, length or model.context_length, wide)
    buffers += compressed_buffers(
        *(model, rows, length or model.context_length, acts, wide, floats),
        quantised=small,
        most_scores=GPU_INDEX_SCORES,
    )
    if small and rows > 1 and model.dense_width:
        # Gate and up as one product, for several rows of a layer without experts.
        buffers.append(Buffer("dense_products", (rows, 2 * model.dense_width)))
    if model.streams is not None:
        buffers += stream_buffers(model.streams, hidden, rows, acts, wide, quantised=small)
    if model.ngrams is not None:
        buffers += ngram_buffers(
            model.ngrams, model.residual_width, hidden, rows, acts, wide, quantised=small
        )
    buffers += layer_input_buffers(model, rows, acts, wide, quantised=small)
    buffers += latent_expert_buffers(model, rows, acts, wide, quantised=small)
    if model.unrouted_width:
        buffers += activation_buffers("unrouted_h", rows, model.unrouted_width, acts, quantised=small)
    if model.orders is not None:
        buffers += _gathered_buffers(model.orders, rows, top_k, acts, quantised=small)
    if model.deep_layers:
        buffers.append(Buffer("deep", (rows, model.deep_layers * hidden)))  # DeepStack's additions
    if adapter_rank:
        buffers += _adapter_buffers(model, rows, adapter_rank, wide)
    return tuple(buffers)


def _delta_net_buffers(delta_net: GatedDeltaNetShape, rows: int, wide: GpuFloat) -> list[Buffer]:
    heads = delta_net.heads
    widths = {"delta_mixed": heads.channels}  # q, k and v after the convolution
    if heads.is_kimi:
        widths["delta_qkv"] = heads.channels
    if heads.is_kimi and delta_net.gate_rank:
        names = ("delta_a",) if delta_net.has_full_gate else ("delta_a", "delta_z")
        widths |= dict(zip(names, (width for _, width in delta_net.gate_parts), strict=True))
    of_chunks = (
        ("delta_inverse", *(["delta_scores"] if heads.is_kimi else [])) if rows > SMALL_BATCH_ROWS else ()
    )
    return [
        *(Buffer(name, (rows, width), wide) for name, width in widths.items()),
        *(Buffer(name, (rows, heads.value_heads, DELTA_CHUNK), wide) for name in of_chunks),
    ]


def _latent_buffers(
    latent: LatentAttentionShape, rows: int, wide: GpuFloat, floats: GpuFloat
) -> list[Buffer]:
    by_head = rows * latent.num_heads
    return [
        Buffer("latent_q", (rows, latent.q_rows), wide),
        Buffer("nope", (by_head, latent.nope_dim), floats),
        Buffer("rotated", (by_head, latent.rotary_dim), "float16"),
        Buffer("latent_attended", (by_head, latent.rank), floats),
    ]


def _indexer_buffers(
    indexer: IndexerShape | BlockIndexerShape, rows: int, length: int, wide: GpuFloat
) -> list[Buffer]:
    rule, has_weights = indexer.rule, isinstance(indexer, IndexerShape)
    of_row = indexer.choices * stride_of_choice(length, rule)
    # Keys with the heads' weights and gates, whose queries have another input, or keys with queries.
    projected = indexer.dim + (
        indexer.q_width if isinstance(indexer, BlockIndexerShape) else indexer.num_heads
    )
    projected += 0 if isinstance(indexer, BlockIndexerShape) else indexer.gate_width
    # KV slots of the keys, or blocks.
    chosen = rule.most_blocks * (rule.block if has_weights else 1)
    return [
        Buffer("index_projected", (rows * projected,), wide),
        Buffer("index_q", (rows, indexer.q_width if has_weights else 0), wide),
        Buffer("index_queries", (rows, indexer.q_width), "float16"),
        Buffer("index_scores", (min(rows * of_row, max(LEAST_SCORED_ROWS * of_row, GPU_INDEX_SCORES)),)),
        Buffer("chosen_keys", (rows, indexer.choices, chosen), "int32"),
        Buffer("last_keys", (rows,), "int32"),
    ]


def head_stream_buffers(model: ModelShape, rows: int, floats: GpuFloat) -> tuple[Buffer, ...]:
    """Returns the buffers through which a head of up to `rows` rows reads a residual of several streams; none if it is
    one vector. Apart from a step's, as a head of few rows takes int8 activations in large steps too."""
    if model.streams is None:
        return ()
    small = rows <= SMALL_BATCH_ROWS
    acts, streams, hidden = "float32" if small else floats, model.streams, model.hidden_size
    return tuple(stream_buffers(streams, hidden, rows, acts, "float32", quantised=small))


def head_arena_bytes(model: ModelShape, rows: int, floats: GpuFloat) -> int:
    """Returns the bytes of the arena that heads of all sizes up to `rows` rows share."""
    return max(arena_bytes(head_stream_buffers(model, size, floats)) for size in step_sizes(rows))


def _adapter_buffers(model: ModelShape, rows: int, rank: int, wide: GpuFloat) -> list[Buffer]:
    """Returns buffers for the vectors between an adapter's two matrices (of q, k and v, or of each route's gate and
    up), and for the terms of gate and up."""
    inner = max(model.top_k * model.expert_width, model.unrouted_width)
    return [
        Buffer("adapter_shrunk", (rows * max(3, 2 * model.top_k) * rank,)),
        Buffer("adapter_gate_up", (rows * 2 * inner,), wide),
    ]


def _gathered_buffers(
    orders: ColumnOrders, rows: int, top_k: int, acts: str, *, quantised: bool
) -> list[Buffer]:
    """Returns the buffers for the input of one product, or of all routes' experts, in the order of their columns."""
    numbers = rows * max(orders.most_columns, top_k * orders.expert_columns)
    return activation_buffers("gathered", 1, numbers, acts, quantised=quantised)


def _dense_numbers(model: ModelShape, projected: int) -> int:
    """Returns the number of weights of the largest matrix of a layer's attention. projected: total rows of the
    matrices over the layer's input."""
    hidden, latent = model.hidden_size, model.latent
    dense = max(projected * hidden, hidden * model.mixed_width)
    dense = max(dense, compressed_numbers(model))
    if isinstance(model.streams, HyperConnections):
        dense = max(dense, (model.streams.low_rank + model.streams.count) * model.residual_width)
    if model.ngrams is not None:
        dense = max(dense, (model.residual_width + hidden) * model.ngrams.width)
    return dense if latent is None else max(dense, latent.q_rows * latent.q_rank)


def _scratch_numbers(model: ModelShape, projected: int, room: int) -> int:
    """Returns the number of weights in the buffer of unpacked matrices: `room`, at most all experts of a layer, and at
    least attention's largest matrix and one expert's gate and up. projected: as in `_dense_numbers`."""
    hidden = model.hidden_size
    of_expert = 2 * model.expert_width * hidden
    experts = min(model.num_experts * of_expert, room)
    return max(_dense_numbers(model, projected), 2 * model.unrouted_width * hidden, of_expert, experts)


def gpu_arena_bytes(
    model: ModelShape,
    max_tokens: int,
    floats: GpuFloat,
    *,
    float_weights: bool,
    adapter_rank: int = 0,
    length: int | None = None,
) -> int:
    """Returns the bytes of the arena that steps of all sizes up to `max_tokens` rows share. Other arguments: see
    `gpu_step_buffers`."""
    return max(
        arena_bytes(
            gpu_step_buffers(
                model, size, floats, float_weights=float_weights, adapter_rank=adapter_rank, length=length
            )
        )
        for size in step_sizes(max_tokens)
    )
