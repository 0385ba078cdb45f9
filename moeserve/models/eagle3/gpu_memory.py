"""The bytes of an EAGLE-3 head's buffers on a GPU, which models/blocks/gpu/draft_head.py allocates."""

from __future__ import annotations

from moeserve.models.buffers import BYTES, GpuFloat
from moeserve.models.eagle3.shape import DraftHeadShape
from moeserve.models.interface import ModelShape
from moeserve.models.step_buffers import (
    CHAIN_ROWS,
    NEXT_TOKEN_ROWS,
    drafting_bytes,
    product_input_bytes,
    step_sizes,
)


def gpu_head_bytes(
    head: DraftHeadShape,
    model: ModelShape,
    *,
    max_tokens: int,
    max_model_len: int,
    max_num_seqs: int,
    drafts: int,
    floats: GpuFloat,
) -> int:
    """Returns the bytes that a head needs besides weights and KV: the buffers of any drafting layer, the copies of the
    model's residual and the inputs made from them, the scores, and RoPE's tables. max_tokens: rows of a step. floats:
    dtype that the tensor cores multiply."""
    own, width = head.own, head.target_size
    rows, tapped = step_sizes(max_tokens)[-1], len(head.taps) * width
    copies = BYTES[floats] * rows * tapped + (4 * rows * width if model.num_layers in head.taps else 0)
    inputs = product_input_bytes(min(rows, NEXT_TOKEN_ROWS), tapped, floats)
    scores = 4 * min(step_sizes(max_num_seqs)[-1], CHAIN_ROWS) * own.vocab_size if head.has_output else 0
    angles = 4 * max_model_len * sum(form.rotary_dim for form in own.forms)
    return drafting_bytes(own, max_tokens, max_num_seqs, drafts, floats) + copies + inputs + scores + angles
