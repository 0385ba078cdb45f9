"""Per-layer embeddings (Gemma 3n, https://ai.google.dev/gemma/docs/gemma-3n): a separate input of each layer for
each token, on the pool's stream:

inputs = (table[token] * sqrt(width) + norm(projection(embedding))) / sqrt(2)    for all layers at once
x = (x + norm(output(gelu(gate(x)) * inputs[layer]))) * factor                   after a layer's feed-forward
"""

from __future__ import annotations

from torch import Tensor

from moeserve.kernels.cpu_stream import CpuStream
from moeserve.models.blocks.cpu.workspace import CpuWorkspace
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_weights import CpuLayerInput, CpuLayerInputs


def make_inputs(
    stream: CpuStream, w: CpuLayerInputs, shape: ModelShape, token_ids: Tensor, n: int, space: CpuWorkspace
) -> None:
    """Launches the computation of all layers' per-layer embeddings, space.inputs.all, from token_ids (int32 [n]) and
    from x, which holds the embeddings. n: rows of the step. The projection is not divided by sqrt(hidden), because the
    norm after it cancels such a factor (except for epsilon)."""
    s, width = space.inputs, shape.layer_input_width
    assert s is not None
    stream.embed(w.table.table, w.table.ggml_type, token_ids, n, s.all, scale=width**0.5)
    stream.gelu_gate(None, space.x, 0, n, space.y)
    stream.linear(space.y, n, w.projection, [s.projected])
    eps, rows = shape.rms_eps * shape.hidden_size, n * shape.num_layers
    stream.add_norm(s.projected.view(-1, width), w.norm, eps, rows, s.all.view(-1, width), factor=0.5**0.5)


def add_input(
    stream: CpuStream, w: CpuLayerInput, eps: float, factor: float, layer: int, n: int, space: CpuWorkspace
) -> None:
    """Launches the addition of the layer's own input to x. eps: added to the mean square under the norm's root; n:
    rows of the step."""
    s, block = space.inputs, space.sandwich
    assert s is not None
    assert block is not None
    stream.gelu_gate(None, space.x, 0, n, space.y)
    stream.linear(space.y, n, w.gate, [s.gate])
    stream.gelu_gate(s.gate, s.all, layer * s.gate.shape[1], n, s.gated)
    stream.linear(s.gated, n, w.output, [block.block])
    stream.add_norm(block.block, w.output_norm, eps, n, space.x, factor=factor)
