"""Pointwise operations from expressions: the generated kernels against torch's own operations, types included."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.kernels.triton_device import DEVICE  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels.experts.reference import activate
from moeserve.kernels.operators import pointwise as pw
from moeserve.kernels.operators.pointwise import library, pointwise
from moeserve.kernels.operators.pointwise.expression import trace
from moeserve.kernels.operators.pointwise.layout import collapse, result_strides

# Triton's interpreter lacks bfloat16.
TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32,
         torch.float64, *([torch.bfloat16] if DEVICE == "cuda" else [])]  # fmt: skip


@pointwise
def add(x, y):  # type: ignore[no-untyped-def]
    return x + y


@pointwise
def divide(x, y):  # type: ignore[no-untyped-def]
    return x / y


@pointwise
def larger(x, y):  # type: ignore[no-untyped-def]
    return pw.where(x > y, x, y)


@pointwise
def silu_mul(gate, up, factor):  # type: ignore[no-untyped-def]
    return pw.silu(gate) * up * factor


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=g) * 3).to(dtype).to(DEVICE)
    return torch.randint(1, 2 if dtype == torch.bool else 100, shape, generator=g).to(dtype).to(DEVICE)


def assert_same(mine: Tensor, expected: Tensor) -> None:
    assert mine.shape == expected.shape
    # Halves: this is rounded once, torch's after every step. Triton divides with up to 2 ulp.
    torch.testing.assert_close(mine, expected, rtol=None, atol=None)


@pytest.mark.parametrize("ranks", [(1, 1), (1, 0), (0, 1), (0, 0)])
def test_types_promote_as_torchs(ranks: tuple[int, int]) -> None:
    shapes = [(5,) if rank else () for rank in ranks]
    types = TYPES if ranks == (1, 1) else [torch.uint8, torch.int64, torch.float16, torch.float32]
    for first, second in itertools.combinations_with_replacement(types, 2):
        x, y = numbers(shapes[0], first), numbers(shapes[1], second, seed=1)
        assert_same(add.launch(x, y), x + y)
        assert_same(divide.launch(x, y), x / y)
        assert_same(larger.launch(x, y), torch.where(x > y, x, y))
        assert_same(larger.reference(x, y), torch.where(x > y, x, y))


@pytest.mark.parametrize("number", [True, 3, 2**40, 1.5, -0.1])
def test_numbers_promote_as_torchs(number: float) -> None:
    for dtype in TYPES:
        if number == 2**40 and dtype.itemsize < 8:
            continue  # torch raises or wraps, by type
        x = numbers((7,), dtype)
        for mine, expected in ((add.launch(x, number), x + number), (divide.launch(x, number), x / number)):
            # The interpreter's numbers are float32.
            precision = 1e-13 if expected.dtype == torch.float64 and DEVICE == "cuda" else 1e-6
            precision = 1e-3 if expected.dtype.itemsize == 2 else precision
            torch.testing.assert_close(mine, expected, rtol=precision, atol=precision)


def views() -> list[tuple[str, Tensor, Tensor]]:
    x = numbers((4, 6, 5), torch.float32)
    row, big = numbers((5,), torch.float32, 1), numbers((9, 12, 10), torch.float32, 2)
    return [
        ("same", x, x * 2),
        ("one element", x[:1, :1, :1], x[1:2, 1:2, 1:2]),
        ("no element", x[:0], row),
        ("without dimensions", x, x[0, 0, 0]),
        ("row", x, row),
        ("column", x, x[:, :1, :1]),
        ("both expand", x[:, :1], x[:1, :, :1]),
        ("middle", x, x[:, :1, :]),
        ("transposed", x, numbers((5, 6, 4), torch.float32, 3).permute(2, 1, 0)),
        ("both transposed", x.permute(2, 0, 1), (x + 1).permute(2, 0, 1)),
        ("steps", big[::2, ::2, ::2][:4], x[:, :, :]),
        ("reversed rows of a table", x.flatten(0, 1), big.flatten(0, 1)[3:99:4, :5]),
        ("expanded", x, row.expand(4, 6, 5)),
        ("unaligned", big.flatten()[1:121], big.flatten()[3:123]),
        ("longer than a program", numbers((2500,), torch.float32), numbers((2500,), torch.float32, 4)),
        ("many rows", numbers((70, 33), torch.float32), numbers((33, 70), torch.float32, 5).T),
        ("five dimensions", numbers((2, 3, 2, 2, 3), torch.float32), big[None, :2, :3, :2, None].transpose(1, 2)),
    ]  # fmt: skip


@pytest.mark.parametrize(("x", "y"), [case[1:] for case in views()], ids=[case[0] for case in views()])
def test_broadcasting_strides_and_tails(x: Tensor, y: Tensor) -> None:
    expected = x + y
    mine = add.launch(x, y)
    assert torch.equal(mine, expected)
    for size, stride, theirs in zip(mine.shape, mine.stride(), expected.stride(), strict=True):
        assert size <= 1 or stride == theirs
    out = torch.zeros(*expected.shape, 2, dtype=torch.float64, device=DEVICE)[..., 1]
    assert add.launch(x, y, out=out) is out
    assert torch.equal(out, expected.double())


def test_out_may_be_an_argument() -> None:
    x, y = numbers((3, 5), torch.float32), numbers((5,), torch.float32, 1)
    expected = x + y
    assert add.launch(x, y, out=x) is x
    assert torch.equal(x, expected)


def test_another_number_is_no_other_kernel() -> None:
    x = numbers((16,), torch.float32)
    for number in (1, 2, 16):
        assert torch.equal(add.launch(x, number), x + number)
    kernels = dict(add._kernels)
    plans = len(add._plans)
    assert torch.equal(add.launch(x, 5), x + 5)
    assert add._kernels == kernels
    assert len(add._plans) == plans


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_chain_is_rounded_once(dtype: torch.dtype) -> None:
    gate, up = numbers((6, 40), dtype), numbers((6, 40), dtype, 1)
    expected = (F.silu(gate.double()) * up.double() * 0.5).to(dtype)
    mine = silu_mul.launch(gate, up, 0.5)
    assert mine.dtype == dtype
    torch.testing.assert_close(mine, expected, rtol={2: 1e-3, 4: 1e-6, 8: 1e-7}[dtype.itemsize], atol=1e-7)
    rtol = 1e-3 if dtype.itemsize == 2 else 1e-6
    torch.testing.assert_close(silu_mul.reference(gate, up, 0.5), mine, rtol=rtol, atol=0)


FUNCTIONS = {
    "exp": (lambda x: pw.exp(x), torch.exp),
    "log": (lambda x: pw.log(abs(x) + 1), lambda x: torch.log(abs(x) + 1)),
    "sqrt": (lambda x: pw.sqrt(abs(x)), lambda x: torch.sqrt(abs(x))),
    "rsqrt": (lambda x: pw.rsqrt(abs(x) + 0.5), lambda x: torch.rsqrt(abs(x) + 0.5)),
    "erf": (lambda x: pw.erf(x), torch.erf),
    "tanh": (lambda x: pw.tanh(x), torch.tanh),
    "sigmoid": (lambda x: pw.sigmoid(x), torch.sigmoid),
    "clamp": (lambda x: pw.clamp(x, -1.5, 2.0), lambda x: torch.clamp(x, -1.5, 2.0)),
    "cube": (lambda x: x**3 - x**2, lambda x: x**3 - x**2),
    "reflected": (lambda x: 1 - x + 2 / x, lambda x: 1 - x + 2 / x),
    "cast": (lambda x: x.to(torch.int32) * 2, lambda x: x.to(torch.int32) * 2),
    "compare": (lambda x: (x >= 0) & ~(x == 1) | (x != x), lambda x: (x >= 0) & ~(x == 1) | (x != x)),
    "infinities": (lambda x: pw.where(x < 0, -math.inf, x), lambda x: torch.where(x < 0, -math.inf, x)),
    "bits": (lambda x: x.to(torch.int32) ^ 5, lambda x: x.to(torch.int32) ^ 5),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name: str) -> None:
    mine, expected = FUNCTIONS[name]
    x = numbers((50,), torch.float32)
    operation = pointwise(mine)
    for result in (operation.launch(x), operation.reference(x), operation(x)):
        torch.testing.assert_close(result, expected(x), rtol=2e-6, atol=2e-7)


def test_minimum_and_maximum_keep_nan() -> None:
    x, y = (
        torch.tensor([1.0, math.nan, 3.0, 4.0], device=DEVICE),
        torch.tensor([2.0, 2.0, math.nan, 1.0], device=DEVICE),
    )
    low, high = pointwise(lambda x, y: pw.minimum(x, y)), pointwise(lambda x, y: pw.maximum(x, y))
    torch.testing.assert_close(low.launch(x, y), torch.minimum(x, y), equal_nan=True)
    torch.testing.assert_close(high.launch(x, y), torch.maximum(x, y), equal_nan=True)


def test_neighbouring_dimensions_merge() -> None:
    x, row = torch.empty(4, 6, 5), torch.empty(5)
    shape = x.shape
    assert collapse(shape, [x.stride(), x.stride()]).sizes == (120,)
    assert collapse(shape, [x.stride(), row.expand(shape).stride()]).sizes == (24, 5)
    turned = x.permute(2, 0, 1)
    assert collapse(turned.shape, [turned.stride(), turned.stride()]).sizes == (120,)
    assert result_strides(turned.shape, [turned]) == turned.stride()
    assert result_strides(shape, [x[:, :, ::2].expand(4, 6, 3)]) == x.stride()


def test_refusals() -> None:
    x = numbers((3,), torch.float32)
    with pytest.raises(ValueError, match="do not broadcast"):
        add(x, numbers((4,), torch.float32))
    with pytest.raises(ValueError, match="does not go into"):
        add(x, x, out=torch.empty(2, 3, device=DEVICE))
    with pytest.raises(TypeError, match=r"does not go into torch\.int32"):
        add(x, x, out=torch.empty(3, dtype=torch.int32, device=DEVICE))
    with pytest.raises(TypeError, match="add takes x, y"):
        add(x)
    with pytest.raises(TypeError, match="no tensor"):
        add(1, 2)
    with pytest.raises(TypeError, match="complex64"):
        add(x.to(torch.complex64), x)
    with pytest.raises(TypeError, match="neither a tensor nor a number"):
        add(x, "1")
    with pytest.raises(TypeError, match=r"and of torch\.float32"):
        pointwise(lambda x, y: x & y)(x, x)
    with pytest.raises(RuntimeError, match="has no gradient"):
        add(x.clone().requires_grad_(), x)
    for wrong, message in ((lambda x: 1, "not a value"), (lambda x: x if x > 0 else -x, "no branches"),
                           (lambda x: x**0.5, "2, 3 or 4"), (lambda x: x + "a", "values and numbers")):  # fmt: skip
        with pytest.raises((TypeError, ValueError), match=message):
            trace(wrong)


def test_equal_steps_are_one() -> None:
    expression = trace(lambda x, y: (x * y + 1.0) / (x * y + 1.0) + 1)
    assert [s.operation for s in expression.steps].count("mul") == 1
    assert [s.constant for s in expression.steps if s.operation == "constant"] == [1.0, 1]


@pytest.mark.parametrize("name", ["silu", "swiglu_oai"])
def test_activations(name: str) -> None:
    gate, up = numbers((5, 33), torch.float32), numbers((5, 33), torch.float32, 1)
    gate, up = gate * 4, up * 4
    mine = {"silu": library.silu_mul, "swiglu_oai": library.swiglu_oai}[name]
    expected = activate(gate.double(), up.double(), name).float()
    for result in (mine.launch(gate, up), mine.reference(gate, up)):
        torch.testing.assert_close(result, expected, rtol=2e-6, atol=1e-6)


def test_gates() -> None:
    x, gate = numbers((5, 33), torch.float16), numbers((33,), torch.float32, 1)
    mine = library.sigmoid_mul.launch(x, gate)
    torch.testing.assert_close(mine, x * torch.sigmoid(gate), rtol=2e-6, atol=1e-6)
