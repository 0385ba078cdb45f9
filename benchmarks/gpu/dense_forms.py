"""Forms of dense products beside those chosen, at Qwen3-30B-A3B's shapes and what two and four GPUs have of them.

    python -m benchmarks.gpu.dense_forms [--only qkv/4,out/4] [--rows 64] [--deadline 100]

Few rows times few output columns make few programs, which wait more than they compute: the forms take K in more slices,
by more warps, or other tiles. The chosen ones are `DENSE_TILES`, `pairs_tile` (linear/op.py), `dense_float_tile`
(linear/large_batch.py) and the head's `quad_tile` (head_product.py): a better form is a line of these. Every form is
compared with float64 before it is timed, in a CUDA graph over copies of the weights that the L2 does not hold together.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import cache

import torch
from torch import Tensor

from benchmarks.gpu import warm_up as warming
from benchmarks.gpu.layer import Q4, Q6
from benchmarks.gpu.shape import BYTES_PER_S, SHAPE, random_planes, seconds, tensors
from moeserve.kernels import launch
from moeserve.kernels.activations import GpuActivations
from moeserve.kernels.experts.quads import QuadTile
from moeserve.kernels.linear.large_batch import (
    FloatTile,
    UnpackScratch,
    dense_float_tile,
    large_batch_linear,
    run_float_gemm,
    unpack,
)
from moeserve.kernels.linear.op import (
    GemmTile,
    PairsTile,
    Weight,
    dense_tile,
    linear,
    pairs_tile,
    run_gemm,
    run_narrow_gemm,
    weight_of,
)
from moeserve.kernels.planes import Planes, dequantize
from moeserve.models.blocks.gpu.head_product import LEAST_ROWS, HeadProduct, quad_tile
from moeserve.models.loading.gpu_weights import MergedLinear
from moeserve.quantization import QuantType
from moeserve.quantization.table import F32

COLD_BYTES = 90e6  # of all copies: the L2 has 50 MB
HEAD_ROWS = 8192  # unpacked at once: 32 MiB of bfloat16
CHECKED = 2048  # columns of the output, from the beginning and from the end
LARGEST_ERROR = 6e-3  # relative; of weights rounded to bfloat16 2e-3

Form = tuple[str | int, ...]  # a method, then its tile


@dataclass(frozen=True, slots=True)
class Product:
    matrices: tuple[tuple[QuantType, int], ...]  # types and rows
    cols: int

    @property
    def rows(self) -> int:
        return sum(rows for _, rows in self.matrices)


PRODUCTS = {
    "qkv/4": Product(((Q4, 1152), (Q6, 128)), 2048),
    "out/4": Product(((Q4, 2048),), 1024),
    "router": Product(((F32, 128),), 2048),
    "qkv": Product(((Q4, 4608), (Q6, 512)), 2048),
    "out": Product(((Q4, 2048),), 4096),
    "qkv/2": Product(((Q4, 2304), (Q6, 256)), 2048),
    "out/2": Product(((Q4, 2048),), 2048),
    "head": Product(((Q6, SHAPE.vocab),), SHAPE.hidden),
}
MANY = (128, 256)


def sliced(*tiles: tuple[int, ...]) -> list[Form]:
    return [("sliced", *tile) for tile in tiles]


# bm, bn, K blocks at once, warps, stages: of a warp bn * K blocks / warps rows, which are 16 at least.
SLICED = sliced(
    (16, 64, 8, 8, 2),
    (16, 32, 8, 8, 2),
    (16, 32, 4, 8, 2),
    (16, 64, 4, 8, 2),
    (16, 16, 8, 8, 2),
    (16, 32, 16, 16, 1),
    (16, 64, 8, 16, 2),
    (16, 64, 16, 16, 1),
    (32, 32, 8, 8, 2),
    (64, 32, 8, 8, 2),
)
# Tokens, columns, depth, warps, stages.
UNPACKED: list[Form] = [
    ("unpacked", 64, 32, 128, 4, 3),
    ("unpacked", 64, 32, 128, 4, 6),
    ("unpacked", 64, 16, 128, 4, 6),
    ("unpacked", 64, 32, 256, 4, 4),
    ("unpacked", 64, 16, 256, 4, 5),
    ("unpacked", 32, 32, 256, 4, 5),
    ("unpacked", 64, 64, 128, 4, 6),
]
MIXED: list[Form] = [("fused", 64, 32, 4, 4, 3), ("fused", 32, 32, 4, 4, 3)]
# Tokens, rows, columns at once, warps.
PAIRS: list[Form] = [
    ("pairs", *tile)
    for tile in [
        (4, 8, 512, 4), (4, 8, 512, 8), (4, 8, 1024, 8), (8, 8, 256, 4), (8, 8, 256, 8), (8, 8, 512, 8),
        (8, 8, 512, 16), (8, 16, 256, 8), (8, 16, 256, 16), (16, 8, 256, 16), (16, 16, 128, 16),
    ]
]  # fmt: skip
HEAD: list[Form] = [
    ("sliced", 64, 64, 4, 8, 2),
    ("sliced", 64, 128, 4, 8, 2),
    ("sliced", 128, 64, 2, 4, 2),
    ("fused", 64, 128, 2, 8, 2),
    ("fused", 128, 128, 2, 8, 2),
    ("fused", 256, 64, 1, 8, 2),
    ("fused", 256, 128, 1, 8, 2),
    ("quads", 64, 64, 4, 3),
    ("quads", 64, 128, 8, 3),
    ("quads", 128, 64, 4, 3),
    ("quads", 128, 128, 8, 3),
    ("quads", 256, 64, 4, 3),
    ("quads", 256, 128, 8, 3),
    ("unpacked", 64, 256, 64, 8, 4),
    ("unpacked", 128, 256, 64, 8, 4),
]


def forms(name: str, n: int) -> list[Form]:
    """Those to try; blocks of more tokens than there are would only waste, but for the tensor cores' 64."""
    if name == "router":
        return PAIRS
    if name == "head":
        return [form for form in HEAD if int(form[1]) <= max(n, 64)]
    if n in MANY:
        return [*UNPACKED[1:5], UNPACKED[6], ("unpacked", 128, 64, 128, 4, 4)]
    sliced_forms = SLICED if name.endswith("/4") else [*SLICED[:3], SLICED[8], SLICED[9]]
    floats = UNPACKED if name.endswith("/4") else UNPACKED[:3]
    blocks = PRODUCTS[name].cols // 128
    return [
        form
        for form in [*sliced_forms, *floats, *(MIXED if name.endswith("/4") else [])]
        if form[0] == "unpacked" or (int(form[1]) <= n and int(form[3]) <= blocks)
    ]


def cases() -> Iterator[tuple[str, int, Form]]:
    """In the order of their weight: a run that ends early has the first ones."""
    for name in PRODUCTS:
        for n in (64, 32, 16, 256, 128) if name != "head" else (64, 256, 16, 32, 128):
            for form in [("chosen",), *forms(name, n)]:
                yield name, n, form


def out_type(name: str, n: int) -> torch.dtype:
    """As a step has it."""
    return torch.float32 if n <= 64 or name in ("head", "router") else torch.bfloat16


class Operands:
    """Of one product: so many copies of its matrices."""

    def __init__(self, name: str, copies: int | None = None) -> None:
        """copies: None: as many as COLD_BYTES holds."""
        product = PRODUCTS[name]
        self.planes = [random_planes(kind, rows, product.cols) for kind, rows in product.matrices]
        self.nbytes = sum(p.nbytes for p in self.planes)
        count = max(1, math.ceil(COLD_BYTES / self.nbytes)) if copies is None else copies
        self.copies = [self.planes, *([_copy(p) for p in self.planes] for _ in range(count - 1))]
        self.floats = F32 if name == "router" else None
        room = min(product.rows, HEAD_ROWS) * product.cols
        self.scratch = UnpackScratch(torch.empty(room, dtype=torch.bfloat16, device="cuda"))

    def x(self, n: int) -> Tensor:
        made = torch.randn(
            n, self.planes[0].cols, device="cuda", generator=torch.Generator("cuda").manual_seed(n)
        )
        return made if self.floats else made.bfloat16()

    def error(self, got: Tensor, x: Tensor) -> float:
        """|got - expected| / |expected| of the first and the last columns."""
        at = total = 0.0
        done = 0
        for p in self.planes:
            for first, end in _ends(p.rows):
                w = dequantize(_rows(p, first, end), 0).double()
                expected = x.double() @ w.T
                mine = got[:, done + first : done + end].double()
                at += float((mine - expected).square().sum())
                total += float(expected.square().sum())
            done += p.rows
        return math.sqrt(at / total)


def _copy(p: Planes) -> Planes:
    return Planes(p.type, p.experts, p.rows, p.cols, p.codes.clone(), p.scales.clone(), p.supers.clone())


def _rows(p: Planes, first: int, end: int) -> Planes:
    """Some of its rows."""
    parts = (t[:, first:end] if t.dim() > 1 else t for t in (p.codes, p.scales, p.supers))
    return Planes(p.type, p.experts, end - first, p.cols, *parts)


def _ends(rows: int) -> list[tuple[int, int]]:
    return [(0, rows)] if rows <= 2 * CHECKED else [(0, CHECKED), (rows - CHECKED, rows)]


def weights(planes: list[Planes]) -> list[Weight]:
    return [weight_of(tensors(p), int(p.type), p.cols) for p in planes]


@dataclass(frozen=True, slots=True)
class Case:
    """One form of a product, ready to be launched."""

    run: Callable[[int], None]  # with copy i of the weights
    x: Tensor
    result: Callable[[], Tensor]  # [n, rows], of the last launch


def case(name: str, n: int, form: Form, operands: Operands) -> Case:
    method, *numbers = form
    tile = [int(number) for number in numbers]
    x, rows = operands.x(n), PRODUCTS[name].rows
    if method == "unpacked" and name == "head":
        return _head_in_pieces(operands, x, FloatTile(*tile))
    out = torch.full((n, rows), math.nan, dtype=out_type(name, n), device="cuda")
    count = _counter(n)
    pairs = [(w[0], w[1] if len(w) > 1 else None) for w in map(weights, operands.copies)]

    def of_copy(i: int) -> tuple[Weight, Weight | None]:
        return pairs[i % len(pairs)]

    def by_linear(i: int) -> None:
        first, *more = operands.copies[i % len(pairs)]
        second, kind = (tensors(more[0]), int(more[0].type)) if more else (None, 0)
        linear(x, None, None, count, tensors(first), int(first.type), second, kind, first.cols, out)

    launches: dict[str, Callable[[int], None]] = {
        "chosen": by_linear
        if n <= 64 or name in ("head", "router")
        else lambda i: large_batch_linear(x, *of_copy(i), count, out, operands.scratch),
        "sliced": lambda i: run_gemm(x, *of_copy(i), None, count, out, tile=_gemm_tile(tile, sliced_k=True)),
        "fused": lambda i: run_gemm(x, *of_copy(i), None, count, out, tile=_gemm_tile(tile, sliced_k=False)),
        "unpacked": lambda i: large_batch_linear(
            x, *of_copy(i), count, out, operands.scratch, tile=FloatTile(*tile)
        ),
        "pairs": lambda i: run_narrow_gemm(x, *of_copy(i), count, out, tile=PairsTile(*tile)),
    }
    if method == "quads" or (method == "chosen" and _is_by_quads(name, n)):
        return Case(_by_quads(operands, x, out, tile or None), x, lambda: out)
    run = launches[str(method)]
    return Case(run, x, lambda: out)


def _is_by_quads(name: str, n: int) -> bool:
    """As the decoder chooses for its head."""
    return name == "head" and n >= LEAST_ROWS


def _gemm_tile(tile: list[int], *, sliced_k: bool) -> GemmTile:
    bm, bn, k_blocks, warps, stages = tile
    return GemmTile(bm, bn, k_blocks, warps, stages, sliced_k)


def _counter(n: int) -> Tensor:
    return torch.tensor([n], dtype=torch.int32, device="cuda")


def _by_quads(operands: Operands, x: Tensor, out: Tensor, tile: list[int] | None) -> Callable[[int], None]:
    """tile: tokens, then a QuadTile; None: the chosen one. The reordering of x is part of it."""
    n, hidden = x.shape
    product = HeadProduct(n, hidden, x.device, tile=(tile[0], QuadTile(*tile[1:])) if tile else None)
    count, y = _counter(n), GpuActivations(x, None, None)

    def run(i: int) -> None:
        (p,) = operands.copies[i % len(operands.copies)]
        product(MergedLinear(p), y, count, out)

    return run


def _head_in_pieces(operands: Operands, x: Tensor, tile: FloatTile) -> Case:
    """Unpacked a piece at a time, each piece's products by themselves: a served form would store them side by side."""
    ((head,),) = operands.copies
    count, n = _counter(len(x)), len(x)
    pieces = [
        (weights([_rows(head, first, min(first + HEAD_ROWS, head.rows))])[0])
        for first in range(0, head.rows, HEAD_ROWS)
    ]
    outs = [torch.full((n, w.rows), math.nan, device="cuda") for w in pieces]

    def run(_: int) -> None:
        for w, out in zip(pieces, outs, strict=True):
            floats = operands.scratch.view(1, w.rows, w.cols)
            unpack(w, floats, is_early=True)
            run_float_gemm(x, floats, count, out, tile=tile)

    return Case(run, x, lambda: torch.cat(outs, 1))


@cache
def _small(name: str) -> Operands:
    return Operands(name, copies=1)


def warm_up(name: str, n: int, form: Form) -> None:
    case(name, n, form, _small(name)).run(0)
    torch.cuda.synchronize()


def of_compilation(name: str, n: int, form: Form) -> tuple[object, ...]:
    """What cases have in common that are compiled once."""
    if form == ("chosen",):
        return name, n
    return name, form, out_type(name, n)


def chosen_tile(name: str, n: int) -> str:
    """What the tables say now."""
    product = PRODUCTS[name]
    if name == "router":
        return str(tuple(astuple(pairs_tile(n))))
    if _is_by_quads(name, n):
        block, of_quads = quad_tile(n)
        return f"quads {(block, *astuple(of_quads))}"
    if n > 64 and name != "head":
        return str(astuple(dense_float_tile(n, product.rows)))
    return str(astuple(dense_tile(n, product.matrices[0][1]))[:5])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PRODUCTS), help="products, as named above")
    parser.add_argument("--rows", default="", help="of tokens, such as 32,64 (all)")
    parser.add_argument("--deadline", type=float, default=110.0, help="seconds; the rest is left out")
    options = parser.parse_args()
    began = time.monotonic()
    names, rows = options.only.split(","), [int(n) for n in options.rows.split(",") if n]
    wanted = [c for c in cases() if c[0] in names and (not rows or c[1] in rows)]
    firsts = {of_compilation(*c): c for c in reversed(wanted)}
    tasks: list[warming.Task] = [("dense_forms", "warm_up", c) for c in wanted if c in firsts.values()]
    compiled = warming.in_parallel(tasks, pdl=launch.pdl(), patience=0.7 * options.deadline)
    failed = {of_compilation(*task[2]): error for task, error in compiled.items() if error is not None}
    device = torch.cuda.get_device_name()
    print(
        f"{device}, PDL {launch.pdl()}, {len(tasks)} compiled in {time.monotonic() - began:.0f} s", flush=True
    )
    for error in sorted({str(error).strip().splitlines()[-1][:100] for error in failed.values()}):
        print(f"  {sum(error in str(e) for e in failed.values())} forms do not compile: {error}")
    for name in names:
        operands = Operands(name)
        for n in dict.fromkeys(c[1] for c in wanted if c[0] == name):
            if time.monotonic() - began > options.deadline:
                print("the time is over", flush=True)
                return
            some = [c[2] for c in wanted if c[:2] == (name, n) and of_compilation(*c) not in failed]
            measured = [(time_of(name, n, form, operands), form) for form in some]
            report(name, n, operands, measured)


Measured = tuple[float, float]  # microseconds, relative error


def time_of(name: str, n: int, form: Form, operands: Operands) -> Measured:
    of_form = case(name, n, form, operands)
    of_form.run(0)
    error = operands.error(of_form.result(), of_form.x)
    launches = max(2 if name == "head" else 24, len(operands.copies))
    return seconds(of_form.run, launches, repeats=7) * 1e6, error


def report(name: str, n: int, operands: Operands, measured: list[tuple[Measured, Form]]) -> None:
    """A line a product and number of tokens, the fastest forms first."""
    floor = operands.nbytes / BYTES_PER_S * 1e6
    told = []
    for (us, error), form in sorted(measured, key=lambda entry: entry[0][0]):
        words = f"chosen {chosen_tile(name, n)}" if form == ("chosen",) else f"{form[0]} {tuple(form[1:])}"
        wrong = "" if error < LARGEST_ERROR else " WRONG"
        told.append(f"{us:.1f} {words.replace(' ', '')} {error:.0e}{wrong}")
    print(f"{name} n={n}, reading {floor:.1f} us: " + " | ".join(told), flush=True)


if __name__ == "__main__":
    main()
