"""The properties of an engine from which the paths of its steps follow, before measurements."""

from __future__ import annotations

from dataclasses import replace

from moeserve.models.adapters.scope import AdapterScope
from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.step_buffers import FLOAT32_ROWS, SMALL_BATCH_ROWS
from moeserve.worker.engines.gpu.steps.prompt_tiles import most_tiles, tile_rows
from moeserve.worker.engines.gpu.steps.step_columns import MAX_GRAPH_DECODE
from moeserve.worker.engines.gpu.steps.step_path import (
    StepFacts,
    decode_sizes_in_parts,
    padded_size,
    part_choices,
)


def step_facts(
    model: GpuDecoder, max_num_seqs: int, *, captures_prompts: bool, takes_parts: bool, max_drafts: int = 0
) -> StepFacts:
    """Returns the facts. captures_prompts: prompt steps may have CUDA graphs, if the model allows it. takes_parts:
    steps may be divided; until `choose_parts` has measured, decode steps are divided in two, and prompts long enough
    too. max_drafts: per sequence."""
    shape = model.shape
    # A graph has a single list of tiles, and cannot process recurrent layers in chunks.
    captures_prompts = captures_prompts and not model.has_states and len(shape.forms) == 1
    facts = StepFacts(
        sizes=tuple(model.sizes),
        max_decode_size=min(padded_size(max_num_seqs, model.sizes), model.head_sizes[-1]),
        max_drafts_size=_drafts_size(model, max_num_seqs, max_drafts),
        max_tiles={size: most_tiles(shape, size) for size in model.sizes} if captures_prompts else {},
        tile_tokens=tile_rows(shape) if captures_prompts else 1,
        max_graph_decode=MAX_GRAPH_DECODE,
        scopes=(AdapterScope.NONE, *(() if model.adapters is None else model.adapters.scopes)),
        can_stream=model.can_stream,
        spans_see_ahead=model.shape.spans_see_ahead,
        takes_parts=takes_parts,
    )
    if not takes_parts:
        return facts
    return replace(
        facts,
        decode_parts=frozenset(decode_sizes_in_parts(facts)),
        prompt_parts={size: part_choices(size)[:2][-1] for size in facts.sizes if size > SMALL_BATCH_ROWS},
    )


def _drafts_size(model: GpuDecoder, max_num_seqs: int, max_drafts: int) -> int:
    """Returns the largest size of graphs with drafts. The head computes all rows of a graph at once. Steps of more than
    FLOAT32_ROWS rows round between products, so greedy output would diverge earlier from output without drafts. Without
    a graph, steps are so slow that few drafts pay."""
    if not max_drafts:
        return 0
    rows = min(max_num_seqs * (1 + max_drafts), model.head_sizes[-1], FLOAT32_ROWS)
    return padded_size(rows, model.sizes)
