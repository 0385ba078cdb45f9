"""Lists the buffers of a step on the CPU, as data; `step_buffers.py` lists a GPU's. No torch."""

from __future__ import annotations

from moeserve.models.buffers import INT8_GROUP, Buffer
from moeserve.models.column_orders import ColumnOrders
from moeserve.models.compressed import CompressedAttentionShape, widest_products
from moeserve.models.indexer import BlockIndexerShape, IndexerShape
from moeserve.models.interface import ModelShape
from moeserve.models.latent import LatentAttentionShape
from moeserve.models.mamba2 import Mamba2Shape
from moeserve.models.recurrence import Recurrence
from moeserve.models.residual import AttentionResiduals, NgramShape, ResidualStreams, SinkhornConnections
from moeserve.models.short_conv import ShortConvShape

CPU_LOGIT_ROWS = 64  # rows of logits per head call on the CPU: 39 MB with a vocabulary of 151,936
INDEX_SCORES = 1 << 22  # scores of index keys that are held at once (kernels/csrc/ops/key_choice.h)


def cpu_step_buffers(model: ModelShape, rows: int) -> tuple[Buffer, ...]:
    """Returns the buffers of a CPU step of up to `rows` rows, without logits. Activations are held as float32 and
    as int8, for any weights. `h` is held only in the forms that the experts' weights read; it is counted as int8."""
    hidden = model.hidden_size
    unrouted = [_pair("unrouted_h", rows, model.unrouted_width)] if model.unrouted_width else []
    latent = [] if model.latent is None else _cpu_latent_buffers(model.latent, rows)
    latent += _cpu_compressed_buffers(model, rows)
    recurrent = [] if model.recurrence is None else _cpu_recurrent_buffers(model.recurrence, rows)
    sandwich = [Buffer(name, (rows, hidden)) for name in ("block", "block_sum") if model.is_sandwiched]
    drafting: list[Buffer] = []
    if model.next_token_layer is not None:
        drafting = [
            Buffer("states", (rows, hidden)),
            *_pair("token", rows, hidden),
            *_pair("state", rows, hidden),
        ]
    return (
        Buffer("x", (rows, model.residual_width)),
        *_pair("y", rows, hidden),
        *(_cpu_stream_buffers(model.streams, model.residual_width, hidden, rows) if model.streams else []),
        *(_cpu_ngram_buffers(model.ngrams, model.residual_width, hidden, rows) if model.ngrams else []),
        *sandwich,
        *drafting,
        Buffer("q", (rows, 0 if model.latent else model.q_width)),
        Buffer("gate", (rows, max(model.gate_widths, default=0))),
        Buffer("k", (rows, model.kv_width)),
        Buffer("v", (rows, model.value_width)),
        *(_cpu_layer_inputs(model, rows) if model.layer_input_width else []),
        *latent,
        *(_cpu_indexer_buffers(model.indexer, rows) if model.indexer is not None else []),
        *recurrent,
        *_pair("attended", rows, model.mixed_width),
        *_cpu_latent_experts(model, rows),
        Buffer("router_logits", (rows, model.num_experts)),
        Buffer("h_codes", (rows * model.top_k, int8_row_bytes(model.expert_width)), "uint8"),
        *(buffer for pair in unrouted for buffer in pair),
        *([] if model.orders is None else _gathered(model, model.orders, rows)),
    )


def _gathered(model: ModelShape, orders: ColumnOrders, rows: int) -> list[Buffer]:
    routes = rows * max(1, model.top_k)
    return [
        *(Buffer("gathered", (routes, int8_row_bytes(orders.most_columns)), "uint8") for _ in ("gate", "up")),
        Buffer("orders", (orders.num_columns,), "int32"),
    ]


def _cpu_latent_experts(model: ModelShape, rows: int) -> list[Buffer]:
    width = max((layer.moe.latent for layer in model.layers if layer.moe is not None), default=0)
    return [Buffer("latent_experts", (rows, width)), *_pair("latent_converted", rows, width)] if width else []


def _cpu_stream_buffers(shape: ResidualStreams, width: int, hidden: int, rows: int) -> list[Buffer]:
    if isinstance(shape, AttentionResiduals):
        return [Buffer("block_output", (rows, hidden))]
    if isinstance(shape, SinkhornConnections):
        return [
            *_pair("normed_streams", rows, width),
            Buffer("stream_products", (rows, shape.mix_values)),
            Buffer("stream_weights", (rows, shape.added_values)),
            Buffer("block_output", (rows, hidden)),
        ]
    return [
        *_pair("normed_streams", rows, width),
        Buffer("stream_low_rank", (rows, shape.low_rank)),
        *_pair("stream_gate_input", rows, shape.low_rank),
        Buffer("stream_gate", (rows, width)),
        Buffer("stream_weights", (rows, shape.count)),
        Buffer("block_output", (rows, hidden)),
    ]


def _cpu_ngram_buffers(shape: NgramShape, width: int, hidden: int, rows: int) -> list[Buffer]:
    return [
        Buffer("ngrams", (rows, shape.width)),
        *_pair("ngram_input", rows, shape.width),
        Buffer("ngram_keys", (rows, width)),
        Buffer("ngram_values", (rows, hidden)),
        Buffer("ngram_factors", (rows, width // hidden)),
    ]


def _cpu_recurrent_buffers(shape: Recurrence, rows: int) -> list[Buffer]:
    if isinstance(shape, Mamba2Shape):
        return [Buffer("mamba2", (rows, shape.input_width)), Buffer("decays", (rows, shape.heads.num_heads))]
    if isinstance(shape, ShortConvShape):
        return [Buffer("short_conv", (rows, shape.input_width))]
    of_gates = [
        buffer
        for part, width in shape.gate_parts
        for buffer in (*_pair(f"{part}_input", rows, shape.gate_rank), Buffer(part, (rows, width)))
    ]
    return [Buffer("delta", (rows, shape.input_width)), *of_gates]


def draft_records(model: ModelShape, drafts: int) -> dict[int, Buffer]:
    """Returns by layer the buffers in which recurrent layers keep the state changes of up to `drafts` drafts per
    CPU step, until it is known which drafts are accepted."""
    values = {
        index: layer.mixer.pending_values
        if isinstance(layer.mixer, CompressedAttentionShape)
        else 0
        if layer.recurrence is None
        else layer.recurrence.heads.pending_values
        for index, layer in enumerate(model.layers)
    }
    return {index: Buffer("draft_records", (drafts, each)) for index, each in values.items() if each}


def ngram_records(model: ModelShape, drafts: int) -> Buffer | None:
    """Returns the buffer in which the layer with n-gram embeddings keeps the drafts' inputs, as in `draft_records`;
    None without such a layer."""
    return None if model.ngrams is None else Buffer("ngram_records", (drafts, model.residual_width))


def most_drafts(step_tokens: int, max_num_seqs: int, drafts: int) -> int:
    """Returns the maximum number of drafts per step: `drafts` per request, but at most half of the step's tokens, as
    the router grants them."""
    return min(max_num_seqs * drafts, step_tokens // 2)


def _cpu_latent_buffers(shape: LatentAttentionShape, rows: int) -> list[Buffer]:
    by_head = rows * shape.num_heads
    pairs = [_pair("nope", by_head, shape.nope_dim), _pair("latent_attended", by_head, shape.rank)]
    if shape.q_rank:
        pairs.append(_pair("q_a_normed", rows, shape.q_rank))
    return [
        Buffer("q_a", (rows, shape.q_rank)),
        Buffer("latent_q", (rows, shape.q_rows)),
        Buffer("latent", (rows, shape.head_dim)),
        Buffer("latent_gate", (rows, shape.gate_width)),
        Buffer("latent_values", (rows, shape.output_width if shape.gate == "element" else 0)),
        Buffer("queries", (rows, shape.q_width)),
        *(buffer for pair in pairs for buffer in pair),
    ]


def _cpu_compressed_buffers(model: ModelShape, rows: int) -> list[Buffer]:
    """Returns the buffers of compressed attention, each as wide as the widest layer's; an empty list for other
    models."""
    layers = [layer.mixer for layer in model.layers if isinstance(layer.mixer, CompressedAttentionShape)]
    if not layers:
        return []
    head, products = layers[0], widest_products(layers)
    indexer = next((layer.indexer for layer in layers if layer.indexer is not None), None)
    widths = {"q_a": head.q_rank, "kv": head.head_dim, "compressed": 2 * sum(products)}
    if indexer is not None:
        widths |= {"index_weights": indexer.num_heads, "index_queries": indexer.q_width}
    return [
        *(Buffer(name, (rows, width)) for name, width in widths.items()),
        *(Buffer("index_scores", (INDEX_SCORES,)) for _ in range(indexer is not None)),
        Buffer("attended_rows", (rows, max(layer.window + layer.chosen for layer in layers)), "int32"),
        *_pair("q_a_normed", rows, head.q_rank),
        *_pair("grouped", rows, head.q_width),
    ]


def _cpu_indexer_buffers(shape: IndexerShape | BlockIndexerShape, rows: int) -> list[Buffer]:
    return [
        Buffer("index_keys", (rows, shape.dim)),
        Buffer("index_weights", (rows, shape.num_heads if isinstance(shape, IndexerShape) else 0)),
        Buffer("index_queries", (rows, shape.q_width)),
        Buffer("index_gates", (rows, shape.gate_width if isinstance(shape, IndexerShape) else 0)),
        Buffer("index_scores", (INDEX_SCORES,)),
        Buffer("chosen_keys", (rows, shape.choices * shape.rule.most_keys), "int32"),
    ]


def _cpu_layer_inputs(model: ModelShape, rows: int) -> list[Buffer]:
    width, of_all = model.layer_input_width, model.num_layers * model.layer_input_width
    wide = [Buffer(name, (rows, of_all)) for name in ("layer_inputs", "layer_inputs_projected")]
    return [*wide, Buffer("layer_input_gate", (rows, width)), *_pair("layer_input", rows, width)]


def _pair(name: str, rows: int, cols: int) -> tuple[Buffer, Buffer]:
    return Buffer(name, (rows, cols)), Buffer(f"{name}_codes", (rows, int8_row_bytes(cols)), "uint8")


def int8_row_bytes(cols: int) -> int:
    """Returns the bytes of a row of int8 activations on the CPU, with a scale and two sums per group:
    kernels/csrc/arch/kernels.h."""
    return cols + cols // INT8_GROUP * 16
