"""Experts between two matrices, narrower than the model, on a GPU: back(experts(into(y))), as launches on the current
stream; the same as in blocks/cpu/ffn.py."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.latent.op import norm_rows
from moeserve.kernels.norm.op import add_norm
from moeserve.models.blocks.gpu.expert_run import PendingSum
from moeserve.models.blocks.gpu.linear import multiply
from moeserve.models.blocks.gpu.workspace import GpuWorkspace
from moeserve.models.loading.gpu_weights import GpuMoe


def project_in(w: GpuMoe, count: Tensor, s: GpuWorkspace) -> None:
    """Launches the product that the experts read. Reads s.y. count: int32 [1] on the device, the number of valid
    rows."""
    space = s.latent_experts
    assert space is not None
    into, _ = w.latent
    multiply(into, s.y, count, space.product, s.dense)
    a = space.input
    norm_rows(space.product, None, 0.0, count, a.x, a.codes, a.scales)  # without a norm a copy, quantised


def project_back(
    w: GpuMoe, experts: PendingSum, count: Tensor, s: GpuWorkspace, out: Tensor, eps: float
) -> None:
    """Launches out = back(the sum of all experts' outputs), or of the norm of the sum, which has this epsilon.
    experts: the outputs of the experts on the GPU. The workspace's `sum` has the sum of the experts in RAM, and
    afterwards the sum of all. eps: added to the mean square under the norm's root; count: int32 [1] on the device, the
    number of valid rows."""
    space = s.latent_experts
    assert space is not None
    _, back = w.latent
    a = space.input
    add_norm(space.sum, *experts, None, count, w.latent_norm, eps, a.x, a.codes, a.scales)
    multiply(back, a, count, out, s.dense)
