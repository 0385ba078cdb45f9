"""The operators of torch.ops.moeserve against their references: the dispatcher's way to the C++ on CPU tensors, and
what it calls for CUDA ones, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.triton_device import DEVICE, ints  # isort: skip  (first: it sets up the interpreter)
from moeserve.kernels import operators
from moeserve.kernels.attention.reference import Sequence
from moeserve.kernels.attention.reference import attention as attention_reference
from moeserve.kernels.experts.reference import experts as experts_reference
from moeserve.kernels.norm.reference import norm as norm_reference
from moeserve.kernels.operators import cpu, cuda, meta
from moeserve.kernels.operators.catalogue import OPERATORS
from moeserve.kernels.operators.piecewise.reference import gradients
from moeserve.kernels.planes import repack
from moeserve.kernels.quantize.reference import round_trip
from moeserve.kernels.rope.reference import rope_store as rope_reference
from moeserve.kernels.routing.reference import route as route_reference
from moeserve.kernels.sampling.reference import Params
from moeserve.kernels.sampling.reference import sample as sample_reference
from moeserve.quantization import QUANT_TYPES
from tests.kernels.quantization.plane_bytes import bytes_of
from tests.kernels.weights import Type, Weights, activations, nmse, random_weights

Call = Callable[..., Any]
Run = tuple[str, Callable[[str], Call]]


def through_torch(name: str) -> Call:
    return getattr(torch.ops.moeserve, name)


def on_the_gpu(name: str) -> Call:
    """The dispatcher's way where there is a GPU, else the interpreter's, on CPU tensors."""
    return through_torch(name) if DEVICE == "cuda" else getattr(cuda, name)


RUNS: list[Run] = [("cpu", through_torch), (DEVICE, on_the_gpu)]
each_device = pytest.mark.parametrize("run", RUNS, ids=["C++", "Triton"])


def weight(run: Run, w: Weights) -> list[torch.Tensor]:
    if run[1] is through_torch:
        return operators.weight(bytes_of(w), int(w.type), w.shape, "cpu")
    p = repack(bytes_of(w).to(DEVICE), QUANT_TYPES[w.type], w.shape)
    return [p.codes, p.scales, p.supers]


def call(run: Run, name: str, *arguments: Any) -> Any:
    """Tensors go to the device and come back."""
    device, find = run
    there = [a.to(device) if isinstance(a, torch.Tensor) else a for a in arguments]
    out = find(name)(*there)
    return tuple(t.cpu() for t in out) if isinstance(out, tuple) else out.cpu()


def test_every_operator_has_the_same_arguments_everywhere() -> None:
    for name in operators.NAMES:
        schema = [a.name for a in getattr(torch.ops.moeserve, name).default._schema.arguments]
        for module in (cpu, cuda, meta):
            assert list(inspect.signature(getattr(module, name)).parameters) == schema, (name, module)


@pytest.mark.slow
def test_the_library_is_useful_without_the_server() -> None:
    """Neither the server's packages nor Triton and the C++ extension come with it before they are needed."""
    program = (
        "import sys, torch, moeserve.kernels.operators\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('moeserve.', 'triton'))))\n"
        "print(*(m for m in ('zmq', 'fastapi', 'rpyc', 'tokenizers', 'uvicorn', 'pydantic') if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    ours, others = done.stdout.split("\n")[:2]
    rooms = {name.split(".")[1] for name in ours.split() if name.startswith("moeserve.")}
    assert rooms <= {"kernels", "quantization", "version"}
    assert others == ""
    assert "triton" not in ours.split()
    assert "moeserve.kernels._C" not in ours.split()


@pytest.mark.parametrize("name", operators.NAMES)
def test_examples_of_the_pages(name: str) -> None:
    torch.manual_seed(0)
    exec(OPERATORS[name].example, {"torch": torch, "operators": operators})


def test_examples_of_the_how_to() -> None:
    page = (Path(__file__).parents[3] / "docs/how-to/use-the-operators.md").read_text()
    examples = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(examples) == 4
    for example in examples:
        exec(example, {})


@pytest.mark.parametrize("name", operators.NAMES)
def test_catalogue_names_the_schemas_arguments(name: str) -> None:
    schema = [a.name for a in getattr(torch.ops.moeserve, name).default._schema.arguments]
    assert list(OPERATORS[name].arguments) == schema
    assert (Path(__file__).parents[3] / OPERATORS[name].reference).exists()


def arguments_of(name: str) -> tuple[Any, ...]:
    """Small ones, on the CPU."""
    x, y = torch.randn(3, 64), torch.randn(3, 64)
    matrix = operators.weight(torch.randn(2, 32, 64).half().view(torch.uint8), 1, (2, 32, 64), "cpu")
    down = operators.weight(torch.randn(2, 64, 32).half().view(torch.uint8), 1, (2, 64, 32), "cpu")
    single = operators.weight(torch.randn(8, 64).half().view(torch.uint8), 1, (8, 64), "cpu")
    q, k, v = torch.randn(1, 4, 3, 16), torch.randn(1, 2, 5, 16), torch.randn(1, 2, 5, 16)
    pool, slots, zeros = [torch.zeros(9, 2, 32).half() for _ in "kv"], ints([4, 2]).cpu(), torch.zeros(3)
    angles, ones = torch.rand(2, 16), torch.ones(32)
    return {
        "embed": (slots, single, 1, 64),
        "norm": (x, torch.ones(64), 1e-6),
        "linear": (x, single, 1),
        "rope_store": (torch.randn(2, 4, 32), torch.randn(2, 2, 32), torch.randn(2, 2, 32), ones, ones, 1e-6, angles,
                       angles, slots, *pool),
        "attention": (torch.randn(2, 4, 32), *pool, slots[None], *(torch.tensor([i], dtype=torch.int32)
                                                                    for i in (0, 2, 0, 0))),
        "piecewise_attention": (q, k, q + 1, k - 1, v, 2, True, 0.2),
        "piecewise_attention_backward": (q, k, q, k, v, q, q[..., 0].contiguous(), q, 2, False, None),
        "route": (x, 4),
        "experts": (x, ints([[0, 1], [1, 0], [0, 1]]).cpu(), torch.rand(3, 2), matrix, 1, matrix, 1, down, 1),
        "silu_mul": (x, y[:1]),
        "swiglu_oai": (x.T, y.T),
        "sigmoid_mul": (x.half(), y),
        "sample": (x, zeros.double(), zeros.int(), zeros.double() + 1, zeros.double(), zeros.long(), zeros.long()),
    }[name]  # fmt: skip


@pytest.mark.parametrize("name", operators.NAMES)
def test_torchs_own_checks(name: str) -> None:
    """Schema, meta function and what torch.compile traces: `torch.library.opcheck`."""
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(getattr(torch.ops.moeserve, name).default, arguments_of(name), test_utils=checks)


def test_wrong_arguments_are_refused_before_memory_is_read() -> None:
    ops = torch.ops.moeserve
    for name, index, wrong, message in (
        ("norm", 1, torch.ones(63), "weight is .63., but cols is 64"),
        ("norm", 0, torch.randn(64, 3).T, "x is .* contiguous"),
        ("route", 0, torch.randn(3, 8).double(), "logits is torch.float64"),
        ("rope_store", 8, torch.zeros(3, dtype=torch.int32), "slots is .3., but n is 2"),
        ("experts", 1, torch.zeros(3, 2), "ids is torch.float32"),
        ("sample", 4, torch.zeros(2).double(), "min_p is .2., but n is 3"),
        ("piecewise_attention", 5, -1, "at least 0"),
        ("silu_mul", 1, torch.randn(3, 63), "do not broadcast"),
    ):
        arguments = list(arguments_of(name))
        arguments[index] = wrong
        with pytest.raises(ValueError, match=message):
            getattr(ops, name)(*arguments)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_of_piecewise_attention(causal: bool) -> None:
    g = torch.Generator().manual_seed(1)
    shapes = ((1, 4, 5, 16), (1, 2, 9, 16))
    leaves = [torch.randn(shapes[i], generator=g).to(DEVICE).requires_grad_() for i in (0, 1, 0, 1, 1)]
    out, _ = torch.ops.moeserve.piecewise_attention(*leaves, 3, causal)
    weights = torch.randn(out.shape, generator=g)
    (out * weights.to(DEVICE)).sum().backward()
    inputs = tuple(x.detach().cpu() for x in leaves)
    for mine, expected in zip(leaves, gradients(inputs, weights, 3, causal), strict=True):
        assert mine.grad is not None
        assert nmse(mine.grad.cpu(), expected.double()) < 1e-9


def test_shapes_without_data() -> None:
    x, logits = torch.empty(3, 64, device="meta"), torch.empty(3, 8, device="meta")
    matrix = [torch.empty(1, 10, 36, dtype=torch.uint8, device="meta")]
    assert torch.ops.moeserve.linear(x, matrix, int(Type.Q4_0)).shape == (3, 10)
    assert [t.dtype for t in torch.ops.moeserve.route(logits, 2)] == [torch.int32, torch.float32]


@each_device
def test_rows(run: Run) -> None:
    w = random_weights(Type.Q4_K, 7, 256)
    ids = ints([6, 0, 3])
    assert torch.equal(
        call(run, "embed", ids, weight(run, w), int(w.type), 256), w.values()[ids.cpu().long()]
    )
    x, scale = activations("gaussian", 3, 256), torch.rand(256)
    assert nmse(call(run, "norm", x, scale, 1e-6), norm_reference(x, scale, 1e-6)) < 1e-12


@each_device
def test_linear(run: Run) -> None:
    w, x = random_weights(Type.Q6_K, 40, 256), activations("gaussian", 3, 256)
    out = call(run, "linear", x, weight(run, w), int(w.type))
    assert nmse(out, round_trip(x) @ w.values().double().T) < 1e-12


@each_device
def test_attention_block(run: Run) -> None:
    n, heads, kv_heads, dim = 5, 4, 2, 32
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, h, dim, generator=g) for h in (heads, kv_heads, kv_heads))
    q_norm, k_norm, angles = torch.rand(dim), torch.rand(dim), torch.rand(n, dim // 2) * 6
    slots = torch.tensor([8, 1, 7, 2, 0], dtype=torch.int32)
    pools = [torch.zeros(9, kv_heads, dim, dtype=torch.float16, device=run[0]) for _ in "kv"]
    pools_expected = [torch.zeros(9, kv_heads, dim, dtype=torch.float16) for _ in "kv"]
    rest = (q, k, v, q_norm, k_norm, 1e-6, angles.cos(), angles.sin(), slots)
    scaled, expected = call(run, "rope_store", *rest, *pools), rope_reference(*rest, *pools_expected)
    assert nmse(scaled, expected) < 1e-12
    assert nmse(torch.stack(pools).cpu(), torch.stack(pools_expected)) < 1e-6
    table = torch.stack([slots, slots.flip(0)]).contiguous()
    columns = [np.array(c, np.int32) for c in ([0, 4], [4, 1], [0, 2], [0, 1])]
    attended = run[1]("attention")(
        scaled.to(run[0]), *pools, table.to(run[0]), *(torch.from_numpy(c) for c in columns)
    ).cpu()
    sequences = [Sequence(0, 4, 0, table[0]), Sequence(4, 1, 2, table[1])]
    assert nmse(attended, attention_reference(expected, *pools_expected, sequences)) < 1e-5


@pytest.mark.slow
@each_device
def test_experts(run: Run) -> None:
    n, num, hidden, ff = 3, 3, 64, 96
    gate, up = random_weights(Type.Q4_0, num, ff, hidden), random_weights(Type.Q5_1, num, ff, hidden, seed=1)
    down, x = random_weights(Type.Q8_0, num, hidden, ff, seed=2), activations("gaussian", n, hidden)
    ids, weights = call(run, "route", torch.randn(n, num, generator=torch.Generator().manual_seed(3)), 2)
    expected_ids, expected_weights = route_reference(
        torch.randn(n, num, generator=torch.Generator().manual_seed(3)), 2
    )
    assert torch.equal(ids, expected_ids)
    assert torch.allclose(weights.double(), expected_weights, rtol=1e-5)
    matrices = [m for w in (gate, up, down) for m in (weight(run, w), int(w.type))]
    out = call(run, "experts", x, ids, weights, *matrices)
    values = [w.values() for w in (gate, up, down)]
    assert nmse(out, experts_reference(x, *values, ids, weights, *[round_trip] * 3)) < 1e-5


@each_device
def test_sample(run: Run) -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(4)) * 3
    params = [
        Params(temperature=0.0), Params(seed=2**64 - 5), Params(top_k=5, output=(0, 0), seed=7),
        Params(top_p=0.6, min_p=0.01, temperature=1.5, seed=8),
    ]  # fmt: skip
    columns = (
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        torch.tensor([p.top_k for p in params], dtype=torch.int32),
        torch.tensor([p.top_p for p in params], dtype=torch.float64),
        torch.tensor([p.min_p for p in params], dtype=torch.float64),
        torch.from_numpy(np.array([p.seed for p in params], np.uint64).view(np.int64)),
        torch.tensor([len(p.output) for p in params]),
    )
    tokens = run[1]("sample")(logits.to(run[0]), *columns).tolist()
    assert tokens == [sample_reference(logits[i], p) for i, p in enumerate(params)]
