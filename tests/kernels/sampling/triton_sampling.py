"""Rows of logits sampled on a GPU."""

from __future__ import annotations

import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.sampling.op import DeviceSamplerState, SamplingWorkspace, sample
from moeserve.kernels.sampling.reference import Params
from tests.support.worker.sampling_cases import arguments_of

VOCAB = 2500


def logits_of(rows: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def sample_rows(
    logits: torch.Tensor,
    params: list[Params],
    *,
    bitmask: torch.Tensor | None = None,
    live: int | None = None,
) -> tuple[list[int], DeviceSamplerState]:
    """Slot i + 1 has params[i]; rows in falling order of slots."""
    n = len(params)
    state = DeviceSamplerState(n + 1, VOCAB, DEVICE)
    for i, p in enumerate(params):
        state.bind(i + 1, **arguments_of(p))
    room = SamplingWorkspace(n, VOCAB, DEVICE)
    tokens = torch.full((n,), -7, dtype=torch.int32, device=DEVICE)
    has_chains = bool(state.chains)
    edits = has_chains or bool(state.edits) or bitmask is not None
    sample(
        logits.flip(0).to(DEVICE), ints(list(range(n, 0, -1))), counter(n if live is None else live), state.params,
        state.bias_ids, state.bias_values, state.stop_ids, state.history,
        None if bitmask is None else bitmask.flip(0).to(DEVICE), room.edited if edits else None, room.block_max,
        room.block_sum, room.values, room.ids, tokens, has_chains=has_chains,
    )  # fmt: skip
    return tokens.flip(0).tolist(), state
