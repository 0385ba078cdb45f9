"""The shape of an EAGLE-3 head (https://arxiv.org/abs/2503.01840): one layer that drafts from the residuals before some
of the model's layers.

Row q of the head, for the token at position q > 0:

    g = fc [the model's residuals before the layers `taps`, at position q - 1]       of the norm of these, if
                                                                            `norm_before_fc`
    x = g, or hidden_norm(g)                                                if `norm_before_residual`
    q, k, v = matrices of [attn_norm(embedding of token q), hidden_norm(g)]
    x = x + attention, at position q - 1, attending to rows 1 .. q; x = x + feed-forward(norm(x))
    logits = output(output_norm(x))                                         of the token at q + 1

The row after a draft reads x in place of g, or output_norm(x) if `norm_output`. The head may score fewer tokens than
the model has: `d2t` has their ids. It reads the model's embedding, and its output matrix, unless it has its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from moeserve.models.attention import AttentionShape
from moeserve.models.cpu_step_buffers import int8_row_bytes
from moeserve.models.errors import ModelError, SettingError
from moeserve.models.feed_forward import DenseFfnShape
from moeserve.models.interface import LayerShape, ModelShape
from moeserve.models.shape_reader import ShapeReader
from moeserve.models.sources.gguf import names as n
from moeserve.models.sources.source import ModelSource
from moeserve.quantization.table import I64

ARCHITECTURE: Final = "eagle3"
JOINED: Final = "fc.weight"  # [hidden, taps * the model's hidden]
INPUT_NORM: Final = "input_norm.weight"
STATE_NORM: Final = n.of_layer(0, "attn_norm_2")
IDS: Final = "d2t"  # int64: ids of the scored tokens in the model's vocabulary
QKV: Final = (n.ATTN_Q, n.ATTN_K, n.ATTN_V)

THETA: Final = 10000.0  # of files that do not state it, as in Llama's
_TAPS: Final = ("target_layers", "extract_layers")  # the key's name, and the one before
_MOST_TAPS: Final = 16


@dataclass(frozen=True, slots=True)
class DraftHeadShape:
    own: ModelShape  # the head as a model of one layer, whose vocabulary is the scored tokens
    taps: tuple[int, ...]  # layers before which the model's residual is read; num_layers: behind the last one
    target_size: int  # width of the model's residual
    norm_before_residual: bool
    norm_before_fc: bool
    norm_output: bool
    has_embedding: bool  # of its own
    has_output: bool
    has_ids: bool

    @property
    def attention(self) -> AttentionShape:
        attention = self.own.layers[0].mixer
        assert isinstance(attention, AttentionShape)
        return attention


def input_bytes(head: DraftHeadShape, rows: int) -> int:
    """Returns the bytes that the head's inputs take on the CPU for a step of `rows` rows, beyond the buffers of a
    one-layer model: the model's residuals at the taps, these joined into one row, the states computed from them, and
    the normed token and state."""
    hidden, tapped = head.own.hidden_size, len(head.taps) * head.target_size
    converted = sum(4 * cols + int8_row_bytes(cols) for cols in (tapped, hidden, hidden))
    return rows * (4 * tapped + converted + 4 * hidden)


def read_draft_head(source: ModelSource, model: ModelShape) -> DraftHeadShape:
    """Returns the shape of an EAGLE-3 head that fits the model. Raises ModelError for another file, and for a head
    whose widths or vocabulary do not fit."""
    if source.architecture != ARCHITECTURE:
        raise ModelError(
            source.path,
            f"method eagle3 needs an EAGLE-3 head as its model, and this is of architecture {source.architecture!r}: "
            "leave the method out",
        )
    reader, tensors = ShapeReader(source), source.tensors
    if reader.num_layers != 1:
        raise reader.error("block_count", f"is {reader.num_layers}; EAGLE-3 heads have one layer")
    attention = AttentionShape(
        *reader.heads(),
        has_rope_factors=n.ROPE_FREQS in tensors,
        in_pairs=not reader.flag(n.ROPE_HALVES, default=False),
    )
    taps, target_size = _taps(reader, model), reader.integer("target_hidden_size", 1, 1 << 16)
    before_residual, before_fc, of_output = (
        reader.flag(f"norm_{where}", default=False) for where in ("before_residual", "before_fc", "output")
    )
    has_embedding, has_output, has_ids = (name in tensors for name in (n.TOKEN_EMBD, n.OUTPUT, IDS))
    if has_output:
        scored = tensors[n.OUTPUT].shape[0]
    else:
        scored = model.vocab_size
    if has_ids and (tensors[IDS].type != I64 or tensors[IDS].shape != (scored,)):
        raise SettingError(
            source.path, f"tensor {IDS!r} must have one 64-bit number for each of {scored} tokens"
        )
    reader.integer(
        "vocab_size", 1, 1 << 24, default=model.vocab_size
    )  # of the embedding; nothing is scored by it
    layers = (LayerShape(attention, DenseFfnShape(reader.dense_width())),)
    own = reader.model(layers, rope_theta=THETA, vocab_size=scored)
    head = DraftHeadShape(
        *(own, taps, target_size),
        norm_before_residual=before_residual,
        norm_before_fc=before_fc,
        norm_output=of_output,
        has_embedding=has_embedding,
        has_output=has_output,
        has_ids=has_ids,
    )
    _check_fits(head, source, model)
    _check_tensors(head, source, model)
    return head


def read_ids(source: ModelSource, model: ModelShape) -> npt.NDArray[np.int32]:
    """Returns the scored tokens' ids in the model's vocabulary: int32 [scored]. Raises ModelError for ids that do not
    map to it."""
    ids = np.frombuffer(source.data(IDS), np.int64)
    if ids.min() < 0 or ids.max() >= model.vocab_size or len(np.unique(ids)) != len(ids):
        raise ModelError(
            source.path,
            f"tensor {IDS!r} does not map to the model's {model.vocab_size} tokens; choose "
            "a head made for this model",
        )
    return ids.astype(np.int32)


def draft_head_tensors(head: DraftHeadShape, model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Returns every matrix and vector of the head with its row-major shape."""
    own, attention, hidden = head.own, head.attention, head.own.hidden_size
    width = own.dense_width
    tensors: dict[str, tuple[int, ...]] = {
        JOINED: (hidden, len(head.taps) * head.target_size),
        STATE_NORM: (hidden,),
        n.OUTPUT_NORM: (hidden,),
        n.of_layer(0, n.ATTN_NORM): (hidden,),
        n.of_layer(0, n.ATTN_Q): (attention.q_width, 2 * hidden),
        n.of_layer(0, n.ATTN_K): (attention.kv_width, 2 * hidden),
        n.of_layer(0, n.ATTN_V): (attention.value_width, 2 * hidden),
        n.of_layer(0, n.ATTN_OUTPUT): (hidden, attention.output_width),
        n.of_layer(0, n.FFN_NORM): (hidden,),
        n.of_layer(0, n.FFN_GATE): (width, hidden),
        n.of_layer(0, n.FFN_UP): (width, hidden),
        n.of_layer(0, n.FFN_DOWN): (hidden, width),
    }
    if head.norm_before_fc:
        tensors[INPUT_NORM] = (len(head.taps) * head.target_size,)
    if head.has_embedding:
        tensors[n.TOKEN_EMBD] = (model.vocab_size, hidden)
    if head.has_output:
        tensors[n.OUTPUT] = (own.vocab_size, hidden)
    if attention.has_rope_factors:
        tensors[n.ROPE_FREQS] = (attention.head_dim // 2,)
    return tensors


def _taps(reader: ShapeReader, model: ModelShape) -> tuple[int, ...]:
    """Reads the layers whose inputs are read. Files of transformers may lack them: then they are those of EAGLE's own
    training code."""
    for suffix in _TAPS:
        if reader.has(suffix):
            return tuple(reader.integers(suffix, 0, model.num_layers, most=_MOST_TAPS))
    if model.num_layers < 7:  # the three would not differ
        raise reader.error(_TAPS[0], "is missing")
    return 2, model.num_layers // 2, model.num_layers - 3


def _check_fits(head: DraftHeadShape, source: ModelSource, model: ModelShape) -> None:
    """Raises ModelError if the head is another model's."""
    hidden = head.own.hidden_size
    if head.target_size != model.hidden_size or model.streams is not None:
        size = f"{model.num_streams} x {model.hidden_size}" if model.streams else str(model.hidden_size)
        raise ModelError(
            source.path,
            f"this head reads residuals of {head.target_size} numbers, and the model's have {size}; choose a head "
            "made for this model",
        )
    if hidden != model.hidden_size and not (head.has_embedding and head.has_output):
        raise ModelError(
            source.path,
            f"this head has {hidden} hidden numbers, so it cannot share the matrices of a model with "
            f"{model.hidden_size}; choose a head made for this model",
        )
    if not head.has_ids and head.own.vocab_size != model.vocab_size:
        raise SettingError(
            source.path,
            f"this head scores {head.own.vocab_size} tokens of {model.vocab_size} that the model has, and no {IDS!r} "
            "maps them",
        )


def _check_tensors(head: DraftHeadShape, source: ModelSource, model: ModelShape) -> None:
    expected = draft_head_tensors(head, model)
    for name, dimensions in expected.items():
        tensor = source.tensors.get(name)
        if tensor is None or tensor.shape != dimensions:
            found = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            raise SettingError(source.path, f"tensor {name!r} {found}; {list(dimensions)} is expected")
    for name in source.tensors:
        if name not in expected and name != IDS:
            raise ModelError(
                source.path, f"tensor {name!r} is not a tensor of an EAGLE-3 head; choose another head"
            )
