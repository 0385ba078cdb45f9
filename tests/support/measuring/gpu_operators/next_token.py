"""The kernels of a next-token block's drafts."""

from __future__ import annotations

from dataclasses import replace

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.linear.operands import weight_of
from moeserve.kernels.linear.panel_gemv import multiply_panels
from moeserve.kernels.next_token.op import (
    ChainRows,
    Chosen,
    KeptStates,
    SampledRows,
    SampledStep,
    ScoredPanels,
    draft_of,
    place_drafts,
    start_after_step,
)
from moeserve.quantization.quant_type import QuantType
from tests.support.measuring.gpu_operators.tensors import both, empty, i32, weight

DEPTHS = 3


def drafts(n: int, kind: QuantType) -> None:
    """Launches drafts from the whole vocabulary, from a shortlist, and of tokens with other numbers."""
    vocab, cols, count = 70_000, 2048, empty(1, dtype=i32)
    logits, column = empty(n, vocab), empty(n, dtype=i32)
    planned, of_chain = empty(DEPTHS, n, dtype=i32), empty(DEPTHS, n, dtype=i32)
    chain = ChainRows(column, column, column, column, column, planned, of_chain, empty(DEPTHS, n))
    chosen = Chosen(n, logits.device)
    scored = ScoredPanels(empty(1000, dtype=i32), count)
    head = weight_of(weight(kind, vocab, cols), int(kind), cols)
    multiply_panels(GpuActivations(*both(n, cols)), head, scored.panels, scored.count, count, logits)
    draft_of(logits, count, chosen, chain)
    draft_of(logits, count, chosen, chain, scored)
    draft_of(logits, count, chosen, chain, token_of=empty(vocab, dtype=i32))
    place_drafts(column, count, chain, empty(1))
    rows = SampledRows(column, column, column, column, planned, planned)
    step, states = SampledStep(column, column, count), empty(n, cols)
    kept = KeptStates(states, column)
    rotating = replace(chain, rotary=empty(n, 3, dtype=i32), planned_rotary=empty(DEPTHS, n, 3, dtype=i32))
    for of_chain_rows in (chain, rotating):
        start_after_step(step, rows, states, column, count, of_chain_rows, states, kept)
