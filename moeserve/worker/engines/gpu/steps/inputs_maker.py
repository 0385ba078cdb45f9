"""Makes the input buffers of steps for a model."""

from __future__ import annotations

from functools import partial

from moeserve.models.blocks.gpu.decoder import GpuDecoder
from moeserve.models.indexer import BlockIndexerShape
from moeserve.worker.engines.gpu.steps.slot_tables import SlotTables
from moeserve.worker.engines.gpu.steps.step_inputs import StepInputs


def inputs_maker(
    model: GpuDecoder, tables: SlotTables, head_rows: int, *, dummy_slot: int
) -> partial[StepInputs]:
    """Returns `StepInputs` with the arguments that follow from the model; the step's size and `max_tiles` are left.
    dummy_slot: the request slot of dummy rows."""
    return partial(
        StepInputs,
        head_rows=head_rows,
        dummy_slot=dummy_slot,
        device=model.device,
        max_model_len=tables.slots.shape[1],
        num_kv_slots=model.num_kv_slots,
        has_states=model.has_states,
        has_state_drafts=model.has_state_drafts,
        has_adapters=model.adapters is not None,
        has_windows=tables.windows is not None,
        has_sections=model.shape.rope_sections is not None,
        has_block=model.next_token is not None,
        index_block=model.shape.indexer.rule.block
        if isinstance(model.shape.indexer, BlockIndexerShape)
        else 0,
        sees_ahead=model.shape.spans_see_ahead,
    )
