"""Rows of logits, and the specification's parameters in the words of the devices' `bind`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from moeserve.kernels.sampling.cpu import SamplerState
from moeserve.kernels.sampling.reference import Params
from moeserve.sampling import order
from moeserve.sampling.parameters import PARAMETERS, SamplerSettings, settings_of

INF = float("inf")
TINY = 2.0**-100  # of the largest probability; float32 weights end at 2^-126, the reference's do not


def closed_sequences(sequences: Sequence[Sequence[int]]) -> np.ndarray:
    """int32: each sequence with -1 behind it."""
    return np.array([token for sequence in sequences for token in (*sequence, -1)], np.int32)


def arguments_of(p: Params) -> dict[str, Any]:
    """What `bind` takes."""
    settings = SamplerSettings(**{name: getattr(p, name) for name in PARAMETERS})
    heeded = SamplerSettings(**order.heeded(settings, p.order))
    fields = {f.name: getattr(p, f.name) for f in dataclasses.fields(p) if f.name != "allowed"}
    fields |= settings_of(heeded)
    fields["order"] = order.order_code(heeded, p.order)
    fields["dry_breakers"] = closed_sequences(p.dry_breakers)
    for name in ("bias_ids", "stop_ids", "prompt", "output"):
        fields[name] = np.array(fields[name], np.int32)
    return fields | {"bias_values": np.array(fields["bias_values"], np.float32)}


def bind(state: SamplerState, slot: int, p: Params, **more: Any) -> None:
    state.bind(slot, **arguments_of(p), **more)


def sample_one(logits: torch.Tensor, p: Params, **more: Any) -> int:
    state = SamplerState(1, len(logits))
    bind(state, 0, p, **more)
    slots = np.zeros(1, np.int32)
    if p.allowed is None:
        return int(state.sample(logits[None], slots)[0][0])
    return int(state.sample(logits[None], slots, mask_of_ids(p.allowed, len(logits))[None], slots)[0][0])


def mask_of_ids(ids: Sequence[int], vocab: int) -> np.ndarray:
    """int32 [words], the bit of each id set; words for ids up to the highest one at least."""
    bits = np.zeros((max([*ids, 0]) // 32 + 1) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def survivors_of(state: SamplerState, logits: torch.Tensor, p: Params) -> tuple[list[int], np.ndarray]:
    bind(state, 0, p)
    ids, weights = state.survivors(logits[None], 0)
    possible = weights > TINY
    total = weights.sum(dtype=np.float64)
    return ids[possible].tolist(), weights[possible].astype(np.float64) / total


def random_logits(rng: np.random.Generator, vocab: int) -> torch.Tensor:
    """Rows of every kind: smooth, full of ties, all equal, partly masked, huge."""
    kind = rng.integers(6)
    x = rng.normal(0, rng.choice([0.01, 1, 5]), vocab)
    if kind == 1:
        x = np.round(x * 2) / 2
    elif kind == 2:
        x = np.full(vocab, rng.choice([-3.0, 0.0, 7.5]))
    elif kind == 3:
        x[rng.random(vocab) < 0.5] = -INF
        x[rng.integers(vocab)] = 0.0
    elif kind == 4:
        x *= rng.choice([1e3, 1e30])
    elif kind == 5:
        x[rng.integers(vocab)] += 20
    return torch.from_numpy(x.astype(np.float32))
