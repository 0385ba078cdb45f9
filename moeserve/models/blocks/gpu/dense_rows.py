"""The feed-forward of a layer without experts, for a few rows, as dense products.

A dense product reads the weights once for several rows. As a mixture of one expert, each row would read them again. A
single row uses the mixture, which has one launch less.
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.gating import GatedForm
from moeserve.kernels.linear.join_gated import gated_rows
from moeserve.kernels.linear.op import int8_tokens
from moeserve.models.blocks.gpu.linear import multiply
from moeserve.models.blocks.gpu.workspace import GpuWorkspace
from moeserve.models.loading.gpu_weights import GpuExperts, GpuSharedExpert
from moeserve.models.loading.merged_linear import MergedLinear


def takes_dense_products(w: GpuExperts, s: GpuWorkspace) -> bool:
    """Returns whether steps with this workspace use dense products."""
    takes_int8 = s.rows <= min(int8_tokens(w.gate.rows), int8_tokens(w.down.rows))
    return s.dense_products is not None and takes_int8 and w.gate.quantised == w.up.quantised


def multiply_dense(
    expert: GpuSharedExpert, s: GpuWorkspace, count: Tensor, out: Tensor, form: GatedForm
) -> None:
    """Launches out [rows, hidden] = down(gated(gate y, up y)) with y from the workspace. count: int32 [1] on the
    device, the number of valid rows."""
    w = expert.experts
    width = w.gate.rows
    assert s.dense_products is not None
    products = s.dense_products.view(-1)[: s.rows * 2 * width].view(s.rows, 2 * width)
    multiply(MergedLinear(w.gate, w.up, order=expert.order), s.y, count, products, s.dense)
    h = s.unrouted_h[width]
    if not w.down.quantised:
        h = GpuActivations(h.x, None, None)
    gated_rows(products, count, h, form)
    multiply(MergedLinear(w.down), h, count, out, s.dense)
