"""What layers with inputs of their own, and layers that attend to the keys of another, ask of Triton's kernels, against
the references."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.triton_device import DEVICE, counter, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.embed.op import embed
from moeserve.kernels.embed.reference import EMBEDDED
from moeserve.kernels.layer_inputs import op, reference
from moeserve.kernels.rope.op import rope_store
from moeserve.kernels.rope.reference import rope_store as rope_reference
from tests.kernels.rows.triton_rows import EPS, check_norm, guarded, normal
from tests.kernels.weights import nmse


@pytest.mark.parametrize("width", [32, 48])
def test_the_inputs_of_all_layers(width: int) -> None:
    """The first two of three rows count."""
    layers = 3
    embedded, projected, weight = (
        normal(3, layers * width),
        normal(3, layers * width, seed=1),
        normal(width, seed=2),
    )
    mine = embedded.clone().to(DEVICE)
    op.make_inputs(mine, projected.to(DEVICE), weight.to(DEVICE), 0.3, counter(2))
    expected = reference.make_inputs(embedded, projected, weight, 0.3)
    assert nmse(mine[:2].cpu(), expected[:2]) < 1e-12
    assert torch.equal(mine[2].cpu(), embedded[2])


def test_the_gate_of_a_layers_input() -> None:
    """The layer's columns of all inputs; large gates, of which GELU is 0 or the gate."""
    width, layer = 64, 1
    gate, inputs, out = 6 * normal(4, width), normal(4, 3 * width, seed=1), guarded(4, width)
    own = slice(layer * width, (layer + 1) * width)
    op.gate_input(gate.to(DEVICE), inputs.to(DEVICE)[:, own], counter(3), out)
    check_norm(out, reference.gate_input(gate, inputs[:, own])[:3], 3)


@pytest.mark.parametrize("fills", [True, False])
def test_rows_of_embeddings_read_the_padding_token(fills: bool) -> None:
    table, ids = normal(5, 32), [3, EMBEDDED, 1]
    x = torch.full((3, 32), 7.0, device=DEVICE)
    empty = torch.empty(0, dtype=torch.uint8, device=DEVICE)
    embed(ints(ids), counter(3), [table.to(DEVICE), empty, empty], 0, x, scale=2.0, fills=fills)
    expected = 2 * table[[3, 0, 1]]
    if not fills:
        expected[1] = 7.0
    assert torch.equal(x.cpu(), expected)


def test_queries_without_keys_of_their_own() -> None:
    """q is normalised and rotated as beside keys, and no key is stored."""
    n, heads, kv_heads, dim = 3, 4, 2, 32
    q, norm = normal(n, heads * dim), normal(dim, seed=1)
    cos, sin = normal(8, dim // 2, seed=2), normal(8, dim // 2, seed=3)
    positions, slots = [5, 0, 7], [0, 1, 2]
    out = torch.empty(n, heads, dim, device=DEVICE)
    keys, values = (torch.full((4, kv_heads, dim), 7.0, dtype=torch.float16, device=DEVICE) for _ in range(2))
    rope_store(
        q.to(DEVICE), None, None, norm.to(DEVICE), None, EPS, cos.to(DEVICE), sin.to(DEVICE), ints(positions),
        ints(slots), counter(n), out, keys, values,
    )  # fmt: skip
    some = torch.zeros(n, kv_heads, dim)
    expected = rope_reference(
        q.view(n, heads, dim), some, some, norm, None, EPS, cos[positions], sin[positions], torch.tensor(slots),
        torch.zeros(4, kv_heads, dim), torch.zeros(4, kv_heads, dim),
    )  # fmt: skip
    assert nmse(out.cpu(), expected) < 1e-12
    assert (keys == 7).all()
    assert (values == 7).all()
