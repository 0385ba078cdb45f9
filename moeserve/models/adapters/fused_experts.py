"""PEFT's format for adapters of all experts of a layer in one parameter (`target_parameters`, PEFT's ParamWrapper).

A holds the rows of all experts, one expert after another: [experts * rank, in]. B holds their columns, interleaved:
column r * experts + e is column r of expert e. The module has two parameters: gate and up together, [experts, 2 ff,
hidden], and down, [experts, hidden, ff]. The adapter's dimensions tell which one it changes; its name does not. PEFT
before 0.18 confused out and in, so its A is called B^T here.

gpt-oss's parameters are transposed, which every PEFT version handles, and alternate rows of gate and up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from moeserve.models.adapters.adapter import Floats, LowRank, ProductKey
from moeserve.models.adapters.products import ProductShape
from moeserve.models.adapters.sizes import PairSize
from moeserve.models.sources.gguf import names as n


class FusedForm(NamedTuple):
    is_down: bool
    is_swapped: bool  # as PEFT before 0.18 wrote it

    is_interleaved: bool = False  # rows of gate and up alternate

    @property
    def parameter(self) -> str:
        """Returns the parameter's name in the module."""
        return "down_proj" if self.is_down else "gate_up_proj"


def fused_form(
    inputs: int, outputs: int, gate: ProductShape, *, is_interleaved: bool = False
) -> FusedForm | None:
    """Returns the form that the columns of A and the rows of B fit; None if they fit neither parameter. gate: shape of
    one routed expert's gate. is_interleaved: the parameters are gpt-oss's."""
    hidden, ff = gate.cols, gate.rows
    if is_interleaved:
        forms = {
            (hidden, 2 * ff): FusedForm(is_down=False, is_swapped=False, is_interleaved=True),
            (ff, hidden): FusedForm(is_down=True, is_swapped=False),
        }
        return forms.get((inputs, outputs))
    forms = {
        (2 * ff, hidden): FusedForm(is_down=False, is_swapped=True),
        (hidden, ff): FusedForm(is_down=True, is_swapped=True),
        (hidden, 2 * ff): FusedForm(is_down=False, is_swapped=False),
        (ff, hidden): FusedForm(is_down=True, is_swapped=False),
    }
    return forms.get((inputs, outputs))


def size_of_fused(form: FusedForm, rank: int, inputs: int, outputs: int, experts: int) -> PairSize:
    """Returns the size of the matrices that `split_fused` makes from A [rank, inputs] and B [outputs, rank] of all
    experts together."""
    if form.is_swapped:
        inputs, outputs = outputs, inputs
    if form.is_down:
        return PairSize(rank // experts, inputs, outputs, experts)
    return PairSize(rank // experts, inputs, outputs // 2, 2 * experts)


def split_fused(
    layer: int, form: FusedForm, a: Floats, b: Floats, experts: int
) -> Iterator[tuple[ProductKey, LowRank]]:
    """Yields each expert's matrices. a: [experts * rank, in], b: [out, rank * experts]."""
    of_a = a.reshape(experts, -1, a.shape[1])
    of_b = b.reshape(b.shape[0], -1, experts).transpose(2, 0, 1)
    for expert in range(experts):
        one = LowRank(of_a[expert], of_b[expert])
        if form.is_swapped:
            one = LowRank(one.b.T, one.a.T)
        if form.is_down:
            yield ProductKey(layer, n.FFN_DOWN_EXPS, expert), one
            continue
        half = len(one.b) // 2
        gate, up = (one.b[::2], one.b[1::2]) if form.is_interleaved else (one.b[:half], one.b[half:])
        yield ProductKey(layer, n.FFN_GATE_EXPS, expert), LowRank(one.a, gate)
        yield ProductKey(layer, n.FFN_UP_EXPS, expert), LowRank(one.a, up)
