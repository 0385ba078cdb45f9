"""Per-layer embeddings on a GPU, as launches on the current stream; the same as blocks/cpu/layer_inputs.py."""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.embed.op import embed
from moeserve.kernels.latent.op import norm_rows
from moeserve.kernels.layer_inputs import op
from moeserve.models.blocks.gpu.linear import multiply
from moeserve.models.blocks.gpu.workspace import GpuWorkspace
from moeserve.models.interface import ModelShape
from moeserve.models.loading.gpu_weights import GpuLayerInput, GpuLayerInputs, plane_tensors


def make_inputs(
    w: GpuLayerInputs, shape: ModelShape, token_ids: Tensor, count: Tensor, s: GpuWorkspace
) -> None:
    """Launches the computation of all layers' inputs from x, which holds the embeddings. Rows whose embeddings take
    the place of tokens get the inputs of token 0, the padding token. The projection is not divided by sqrt(hidden),
    because its norm cancels that (except for epsilon). count: int32 [1] on the device, the number of valid rows."""
    space, width, y = s.layer_inputs, shape.layer_input_width, s.y
    assert space is not None
    table = w.table
    embed(token_ids, count, plane_tensors(table), int(table.type), space.all, scale=width**0.5, fills=True)
    norm_rows(s.x, None, 0.0, count, y.x, y.codes, y.scales)  # without a norm a copy, quantised
    multiply(w.projection, y, count, space.projected, s.dense)
    op.make_inputs(space.all, space.projected, w.norm, shape.rms_eps * shape.hidden_size, count)


def project_input(w: GpuLayerInput, layer: int, count: Tensor, s: GpuWorkspace) -> None:
    """Launches s.output = the product of the layer's input after its gate. Reads s.y, which is x as activations.
    count: int32 [1] on the device, the number of valid rows."""
    space = s.layer_inputs
    assert space is not None
    multiply(w.gate, s.y, count, space.gate, s.dense)
    width = w.gate.rows
    op.gate_input(space.gate, space.all[:, layer * width : (layer + 1) * width], count, space.gated)
    multiply(w.output, space.gated, count, s.output.view(s.rows, -1), s.dense)
