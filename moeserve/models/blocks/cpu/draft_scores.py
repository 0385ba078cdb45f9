"""Finds the likeliest token of each row that a drafting block computed, among all or a part of the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moeserve.kernels._C import PANEL_ROWS
from moeserve.kernels.cpu_stream import CpuStream, LinearGroup, Matrix
from moeserve.models.blocks.cpu.residual import norm
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.loading.cpu_weights import CpuNorm

Int32s = npt.NDArray[np.int32]


class Scored(NamedTuple):
    token_ids: Int32s  # [n]: the most likely tokens
    probabilities: npt.NDArray[np.float32]  # [n]: their probabilities among the scored tokens
    bytes_read: int  # of the head


def likeliest(
    stream: CpuStream,
    space: CpuWorkspace,
    weight: CpuNorm,
    eps: float,
    n: int,
    matrix: Matrix,
    product: LinearGroup,
    panels: Int32s | None,
    softcap: float = 0.0,
) -> Scored:
    """Scores the first n rows of x, a batch of logits at a time, and waits. weight: the weight of the norm before the
    head. matrix, product: the head, [vocab, hidden]. panels: int32, the panels of the head's rows to score; None: all.
    eps: added to the mean square under the norm's root."""
    ids, probabilities, bytes_read = [], [], 0
    most = len(space.logits)
    for first in range(0, n, most):
        m = min(most, n - first)
        rows = torch.arange(first, first + m, dtype=torch.int32)
        norm(stream, weight, eps, m, space.x, space.final, rows)
        if panels is None:
            logits = space.logits[:m]
            stream.linear(space.final, m, product, [space.logits])
            bytes_read += matrix.bytes
        else:
            count = PANEL_ROWS * len(panels)
            logits = space.logits.view(-1)[: m * count].view(m, count)
            stream.linear_panels(space.final, m, matrix, torch.from_numpy(panels), logits)
            bytes_read += matrix.bytes * count // matrix.rows
        if softcap:
            stream.softcap(logits, m, softcap)
        stream.wait()
        found, shares = _best(logits, panels)
        ids.append(found)
        probabilities.append(shares)
    return Scored(np.concatenate(ids), np.concatenate(probabilities), bytes_read)


def _best(logits: Tensor, panels: Int32s | None) -> tuple[Int32s, npt.NDArray[np.float32]]:
    highest, best = logits.max(dim=1)
    ids: Int32s = best.int().numpy()
    if panels is not None:
        ids = panels[ids // PANEL_ROWS] * PANEL_ROWS + ids % PANEL_ROWS
    return ids, (highest - logits.logsumexp(dim=1)).exp().numpy()
