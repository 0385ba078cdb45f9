"""The buffers of a GPU's step for compressed attention. No torch."""

from __future__ import annotations

from moeserve.kernels.choice_rule import ChoiceRule, stride_of_choice
from moeserve.models.buffers import Buffer, activation_buffers
from moeserve.models.compressed import CompressedAttentionShape
from moeserve.models.interface import ModelShape


def compressed_layers(model: ModelShape) -> list[CompressedAttentionShape]:
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, CompressedAttentionShape)]


def compressed_input_width(model: ModelShape) -> int:
    """Returns the number of rows of all matrices that multiply a layer's input, for the layer with most; 0 without
    compressed attention."""
    widths = (sum(rows for _, rows in layer.input_parts) for layer in compressed_layers(model))
    return max(widths, default=0)


def index_rule(shape: CompressedAttentionShape) -> ChoiceRule:
    """Returns the rule by which a layer's indexer chooses compressed entries: an entry is a block of keys to
    it."""
    return ChoiceRule(shape.chosen, shape.ratio)


def compressed_numbers(model: ModelShape) -> int:
    """Returns the number of weights in the largest matrix after the layer's input projections; 0 without
    compressed attention."""
    layers = compressed_layers(model)
    of_index = max((0 if a.indexer is None else a.indexer.q_width for a in layers), default=0)
    of_q = (a.q_rank * (a.q_width + of_index) for a in layers)
    return max((*of_q, *(a.output_width * model.hidden_size for a in layers)), default=0)


def compressed_buffers(
    model: ModelShape,
    rows: int,
    length: int,
    acts: str,
    wide: str,
    floats: str,
    *,
    quantised: bool,
    most_scores: int,
) -> list[Buffer]:
    """Returns the additional buffers of compressed attention, each as wide as the widest layer's; an empty list for
    other models. length: positions of the longest request. acts: dtype of activations; quantised: whether they are also
    stored as int8. wide: dtype between two products. floats: dtype that tensor cores multiply. most_scores: maximum
    number of index keys' scores that are held at once."""
    layers = compressed_layers(model)
    if not layers:
        return []
    first = layers[0]
    chooses = next((layer for layer in layers if layer.indexer is not None), None)
    indexer = None if chooses is None else chooses.indexer
    buffers = [
        *activation_buffers("q_a", rows, first.q_rank, acts, quantised=quantised),
        Buffer("compressed_q", (rows * (first.q_width + (0 if indexer is None else indexer.q_width)),), wide),
        Buffer("compressed_attended", (rows, first.q_width), floats),
    ]
    if chooses is None or indexer is None:
        return buffers
    rule = index_rule(chooses)
    of_row = stride_of_choice(length, rule)
    return [
        *buffers,
        Buffer("index_queries", (rows, indexer.q_width), "float16"),
        Buffer("index_scores", (min(rows * of_row, max(16 * of_row, most_scores)),)),
        Buffer("chosen_keys", (rows, 1, rule.most_blocks), "int32"),
        Buffer("last_keys", (rows,), "int32"),
    ]
