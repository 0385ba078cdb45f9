"""What a CpuStream refuses: every tensor of every call, before the pool gets an address."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType as Type
from torch import Tensor

from moeserve.kernels.attention.cpu_plan import build_attention_plan
from moeserve.kernels.cpu_stream import AttentionPlan, LinearGroup
from moeserve.kernels.stream_operands import Activations, Heads, KvLayer, RoutingWorkspace
from tests.kernels.operations import stream_of
from tests.kernels.weights import random_weights

N, HIDDEN, FF, EXPERTS, TOP_K, SLOTS = 3, 64, 96, 5, 2, 8
HEADS = Heads(4, 2, 32)
STREAM = stream_of("plain")
MATRIX = random_weights(Type.Q8_0, 40, HIDDEN).pack(STREAM)  # integer: takes the int8 form
FLOATS = random_weights(Type.F32, 40, HIDDEN).pack(STREAM)
GATE, UP = (random_weights(Type.Q8_0, EXPERTS, FF, HIDDEN, seed=i).pack(STREAM) for i in range(2))
DOWN = random_weights(Type.Q8_0, EXPERTS, HIDDEN, FF).pack(STREAM)

Arguments = dict[str, Any]


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def kv(*, slots: int = SLOTS, values: Tensor | None = None, dtype: torch.dtype = torch.float16) -> KvLayer:
    keys = torch.zeros(slots, HEADS.num_kv, HEADS.dim, dtype=dtype)
    return KvLayer(keys, keys.clone() if values is None else values)


def latent_kv(dim: int = 96) -> KvLayer:
    keys = torch.zeros(SLOTS, 1, dim, dtype=torch.float16)
    return KvLayer(keys, keys)


def by_head(rows: int = N * EXPERTS) -> Activations:
    x = Activations(rows, HIDDEN)
    x.q8.zero_()
    return x


def plan(**changes: Any) -> AttentionPlan:
    one = np.zeros(1, np.int32)
    columns: Arguments = {
        "rows": one, "counts": one + N, "positions": one, "req_slots": one,
        "slot_table": np.zeros((1, 16), np.int32), "heads": HEADS, "threads": 2,
    }  # fmt: skip
    built = AttentionPlan()
    build_attention_plan(built, **(columns | changes))
    return built


def routing(**changes: Tensor) -> RoutingWorkspace:
    workspace = RoutingWorkspace(N, EXPERTS, TOP_K)
    workspace.ids.zero_()
    workspace.weights.zero_()
    for name, tensor in changes.items():
        setattr(workspace, name, tensor)
    return workspace


def one_route() -> RoutingWorkspace:
    return RoutingWorkspace(N, 1, 1)


def good(call: str) -> Arguments:
    """Arguments that the call takes."""
    y, h = Activations(N, HIDDEN), Activations(N * TOP_K, FF)
    for a in (y, h):
        a.f32.zero_()
        a.q8.zero_()
    x, q = torch.zeros(N, HIDDEN), torch.zeros(N, HEADS.num, HEADS.dim)
    k = torch.zeros(N, HEADS.num_kv, HEADS.dim)
    attended = Activations(N, HEADS.num * HEADS.dim)
    table = np.zeros((10, HIDDEN // 32 * 34), np.uint8)
    arguments: dict[str, Arguments] = {
        "embed": {"table": table, "ggml_type": int(Type.Q8_0), "ids": ints(0, 9, 1), "n": N, "x": x},
        "norm": {"x": x, "weight": torch.ones(HIDDEN), "eps": 1e-6, "n": N, "y": y, "rows": None},
        "linear": {"x": y, "n": N, "weights": LinearGroup([MATRIX]), "out": [torch.zeros(N, 40)]},
        "rope_store": {
            "q": q, "k": k, "v": k.clone(), "q_norm": torch.ones(32), "k_norm": torch.ones(64), "eps": 1e-6,
            "cos": torch.ones(N, 16), "sin": torch.ones(N, 16), "slots": ints(0, 7, 1), "kv": kv(), "n": N,
            "heads": HEADS,
        },
        "attention": {"plan": plan(), "q": q, "kv": kv(), "out": attended, "heads": HEADS},
        "latent_store": {
            "q": torch.zeros(N, 2, 96), "latent": torch.zeros(N, 96), "norm": torch.ones(64), "eps": 1e-6,
            "cos": torch.ones(N, 16), "sin": torch.ones(N, 16), "slots": ints(0, 7, 1), "kv": latent_kv(), "n": N,
            "heads": 2, "scale": 1.0, "nope": Activations(2 * N, 64), "queries": torch.zeros(N, 2, 96),
        },
        "linear_by_head": {"x": by_head(), "n": N, "weights": GATE, "out": Activations(N, EXPERTS * FF)},
        "route": {"logits": torch.zeros(N, EXPERTS), "n": N, "workspace": routing()},
        "shared_gate": {"y": y, "n": N, "weight": torch.ones(HIDDEN), "routing": one_route()},
        "experts": {
            "gate": GATE, "up": UP, "down": DOWN, "y": y, "n": N, "routing": routing(), "h": h,
            "expert_token_counts": torch.zeros(2, EXPERTS, dtype=torch.int64), "x": x,
        },
        "stream_norm": {
            "x": torch.zeros(N, HIDDEN), "weight": torch.ones(2, HIDDEN // 2), "eps": 1e-6, "n": N, "y": y,
            "rows": None,
        },
        "scaled_silu": {"x": torch.zeros(N, HIDDEN), "factor": 1.0, "n": N, "out": y},
        "mix_streams": {"gate": torch.zeros(N, HIDDEN), "x": y, "n": N, "out": Activations(N, HIDDEN // 2)},
        "inject": {
            "block": torch.zeros(N, 32), "weights": torch.zeros(N, 2), "n": N, "x": torch.zeros(N, HIDDEN),
        },
    }  # fmt: skip
    return arguments[call]


CALLS = (
    "embed", "norm", "linear", "rope_store", "attention", "latent_store", "linear_by_head", "route", "shared_gate",
    "experts", "stream_norm", "scaled_silu", "mix_streams", "inject",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_good_arguments_are_taken(call: str) -> None:
    getattr(STREAM, call)(**good(call))
    STREAM.wait()


def tensors_of(call: str) -> list[str]:
    return [name for name, value in good(call).items() if isinstance(value, Tensor)]


EACH_TENSOR = [(call, name) for call in CALLS for name in tensors_of(call)]


def _strided(t: Tensor) -> Tensor:
    return torch.zeros(*t.shape, 2, dtype=t.dtype)[..., 0]


SPOILS: dict[str, Callable[[Tensor], Any]] = {
    "element type": lambda t: t.to(torch.float64),
    "stride": _strided,
    "device": lambda t: t.to("meta"),
    "no tensor": lambda t: t.numpy(),
    "empty": lambda t: t[:0],
}


@pytest.mark.parametrize("spoil", SPOILS)
@pytest.mark.parametrize(("call", "name"), EACH_TENSOR, ids=str)
def test_every_tensor_is_checked(call: str, name: str, spoil: str) -> None:
    arguments = good(call)
    arguments[name] = SPOILS[spoil](arguments[name])
    with pytest.raises(ValueError, match=f"^{name}: "):
        getattr(STREAM, call)(**arguments)


WIDE = torch.zeros(N, 2 * HIDDEN)
WRONG: list[tuple[str, Callable[[], Arguments], str]] = [
    ("embed", lambda: {"n": 4}, "ids: 4 rows wanted, not 3"),
    ("embed", lambda: {"x": torch.zeros(2, HIDDEN)}, "x: 3 rows wanted, not 2"),
    ("embed", lambda: {"x": torch.zeros(N, 40)}, "table: no rows of 40 columns"),
    ("embed", lambda: {"table": np.zeros((10, 4), np.float32)}, "table: uint8 wanted"),
    ("embed", lambda: {"table": np.zeros((10, 136), np.uint8)[:, ::2]}, "table: a contiguous array"),
    ("norm", lambda: {"x": WIDE}, "x: rows of 64 elements wanted, not 128"),
    ("norm", lambda: {"weight": torch.ones(32)}, "weight: 64 elements wanted, not 32"),
    ("norm", lambda: {"n": 4}, "y: 4 rows wanted, not 3"),
    ("norm", lambda: {"n": -1}, "y: -1 rows"),
    ("norm", lambda: {"y": Activations(N, HIDDEN, f32=False)}, "y: it has no float32 form"),
    ("norm", lambda: {"rows": ints(0, 1)}, "rows: 3 rows wanted, not 2"),
    ("linear", lambda: {"x": Activations(N, 32)}, "x: 64 columns wanted, not 32"),
    ("linear", lambda: {"x": Activations(N, HIDDEN, q8=False)}, "x: it has no int8 form"),
    (
        "linear",
        lambda: {"x": Activations(N, HIDDEN, f32=False), "weights": LinearGroup([FLOATS])},
        "x: it has no float32 form",
    ),
    ("linear", lambda: {"x": Activations(2, HIDDEN)}, "x: 3 rows wanted, not 2"),
    ("linear", lambda: {"out": []}, "out: one tensor for each matrix"),
    ("linear", lambda: {"out": [torch.zeros(N, 39)]}, "out: rows of 40 elements wanted, not 39"),
    ("linear", lambda: {"out": [torch.zeros(2, 40)]}, "out: 3 rows wanted, not 2"),
    ("rope_store", lambda: {"q": torch.zeros(N, 3, 32)}, "q: rows of 128 elements wanted, not 96"),
    ("rope_store", lambda: {"q_norm": torch.ones(64)}, "q_norm: 128 elements wanted, not 64"),
    ("rope_store", lambda: {"k_norm": torch.ones(33)}, "k_norm: 64 elements wanted, not 33"),
    ("rope_store", lambda: {"cos": torch.ones(N, 32)}, "cos: rows of at most dim / 2"),
    ("rope_store", lambda: {"cos": torch.ones(N, 8)}, "cos: rows of at most dim / 2"),
    ("rope_store", lambda: {"sin": torch.ones(N, 8)}, "sin: rows of 16 elements wanted, not 8"),
    ("rope_store", lambda: {"positions": torch.zeros(N)}, "positions: int32 wanted"),
    ("rope_store", lambda: {"positions": ints(0, 1)}, "positions: 3 rows wanted, not 2"),
    (
        "rope_store",
        lambda: {"positions": ints(0, 0, 0), "sin": torch.ones(2, 16)},
        "sin: 3 rows wanted, not 2",
    ),
    ("rope_store", lambda: {"kv": kv(dtype=torch.float32)}, "kv.keys: float16 wanted"),
    (
        "rope_store",
        lambda: {"kv": kv(values=torch.zeros(7, 2, 32).half())},
        "kv.values: 8 rows wanted, not 7",
    ),
    ("rope_store", lambda: {"heads": Heads(3, 2, 32)}, "heads: num_kv that divides num"),
    ("rope_store", lambda: {"heads": Heads(4, 2, 48)}, "heads: num_kv that divides num"),
    ("attention", lambda: {"q": torch.zeros(2, 4, 32)}, "q: 3 rows wanted, not 2"),
    ("attention", lambda: {"out": Activations(N, 64)}, "out: 128 columns wanted, not 64"),
    ("attention", lambda: {"out": Activations(2, 128)}, "out: 3 rows wanted, not 2"),
    ("attention", lambda: {"heads": Heads(2, 2, 64)}, "plan: it was built for other heads"),
    ("attention", lambda: {"window": -1}, "window: 0"),
    ("attention", lambda: {"sinks": torch.zeros(2)}, "sinks: 4 elements wanted, not 2"),
    (
        "attention",
        lambda: {"kv": kv(values=torch.zeros(SLOTS, 2, 31).half())},
        "kv.values: rows of 64 elements",
    ),
    ("attention", lambda: {"heads": Heads(4, 2, 32, 64, is_latent=True)}, "heads: a value_dim"),
    (
        "attention",
        lambda: {"heads": Heads(4, 2, 32, 32, is_latent=True), "kv": latent_kv(64)},
        "kv.keys: rows of 32 elements",
    ),
    ("latent_store", lambda: {"cos": torch.ones(N, 8)}, "cos: rows of a multiple of 16"),
    ("latent_store", lambda: {"norm": torch.ones(33)}, "norm: elements that 32 divides"),
    ("latent_store", lambda: {"norm": torch.ones(32)}, "latent: rows of 64 elements wanted, not 96"),
    ("latent_store", lambda: {"heads": 3}, "nope: 9 rows wanted, not 6"),
    ("latent_store", lambda: {"nope": Activations(6, 32)}, "q: rows of 128 elements wanted, not 192"),
    ("latent_store", lambda: {"kv": latent_kv(64)}, "kv.keys: rows of 96 elements wanted, not 64"),
    ("latent_store", lambda: {"queries": torch.zeros(N, 96)}, "queries: rows of 192 elements wanted, not 96"),
    ("linear_by_head", lambda: {"x": by_head(14)}, "x: 15 rows wanted, not 14"),
    ("linear_by_head", lambda: {"weights": MATRIX}, "weights: rows that 32 divides"),
    (
        "linear_by_head",
        lambda: {"out": Activations(N, EXPERTS * 64)},
        "out: columns that the heads and 32 divide",
    ),
    ("linear_by_head", lambda: {"out": Activations(2, EXPERTS * FF)}, "out: 3 rows wanted, not 2"),
    ("route", lambda: {"n": 4}, "logits: 4 rows wanted, not 3"),
    (
        "route",
        lambda: {"workspace": RoutingWorkspace(2, EXPERTS, TOP_K)},
        "workspace.ids: 3 rows wanted, not 2",
    ),
    (
        "route",
        lambda: {"workspace": routing(weights=torch.zeros(N, 1))},
        "workspace.weights: rows of 2 elements",
    ),
    (
        "route",
        lambda: {"workspace": RoutingWorkspace(N, EXPERTS, 6)},
        "workspace.ids: there are no 6 experts",
    ),
    ("route", lambda: {"bias": torch.zeros(4)}, "bias: 5 elements wanted, not 4"),
    ("shared_gate", lambda: {"routing": routing()}, "routing.ids: rows of 1 elements wanted, not 2"),
    ("shared_gate", lambda: {"weight": torch.ones(32)}, "weight: 64 elements wanted, not 32"),
    ("experts", lambda: {"up": DOWN}, "up: the shape of gate"),
    ("experts", lambda: {"down": GATE}, "down: "),
    ("experts", lambda: {"gate": MATRIX}, "gate: rows that 32 divides wanted, not 40"),
    ("experts", lambda: {"n": 4}, "y: 4 rows wanted, not 3"),
    ("experts", lambda: {"y": Activations(N, 32)}, "y: 64 columns wanted, not 32"),
    ("experts", lambda: {"h": Activations(5, FF)}, "h: 6 rows wanted, not 5"),
    ("experts", lambda: {"h": Activations(6, FF, q8=False)}, "h: it has no int8 form"),
    ("experts", lambda: {"x": torch.zeros(N, 32)}, "x: rows of 64 elements wanted, not 32"),
    (
        "experts",
        lambda: {"expert_token_counts": torch.zeros(5, dtype=torch.int64)},
        "expert_token_counts: 10 elements",
    ),
    (
        "experts",
        lambda: {"routing": routing(ids=torch.zeros(N, 2, dtype=torch.int64))},
        "routing.ids: int32 wanted",
    ),
    (
        "experts",
        lambda: {"routing": routing(weights=torch.zeros(2, 2))},
        "routing.weights: 3 rows wanted, not 2",
    ),
    ("experts", lambda: {"routing": routing(starts=ints(0))}, "routing.starts: 6 rows wanted, not 1"),
    ("experts", lambda: {"routing": routing(active=ints(0))}, "routing.active: 6 rows wanted, not 1"),
    ("experts", lambda: {"routing": routing(routes=ints(0))}, "routing.routes: 6 rows wanted, not 1"),
    ("experts", lambda: {"activation": "tanh"}, "activation: none of silu"),
    ("experts", lambda: {"gate_bias": torch.zeros(FF)}, "gate_bias: 480 elements wanted, not 96"),
    ("experts", lambda: {"up_bias": torch.zeros(FF)}, "up_bias: 480 elements wanted, not 96"),
    ("experts", lambda: {"down_bias": torch.zeros(FF)}, "down_bias: 320 elements wanted, not 96"),
]


@pytest.mark.parametrize(("call", "changes", "message"), WRONG, ids=lambda v: v if isinstance(v, str) else "")
def test_sizes_that_do_not_fit(call: str, changes: Callable[[], Arguments], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        getattr(STREAM, call)(**(good(call) | changes()))


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        ("embed", {"ids": ints(0, 10, 1)}, "token id 10"),
        ("embed", {"ids": ints(-1, 0, 1)}, "token id -1"),
        ("norm", {"rows": ints(0, 3, 1)}, "row 3"),
        ("rope_store", {"slots": ints(0, 8, 1)}, "KV slot 8"),
        ("latent_store", {"slots": ints(0, 8, 1)}, "KV slot 8"),
        ("rope_store", {"positions": ints(0, 3, 1)}, "position 3"),
        ("rope_store", {"positions": ints(0, -1, 1)}, "position -1"),
        ("latent_store", {"positions": ints(0, 3, 1)}, "position 3"),
    ],
)
def test_ids_beside_what_they_address(call: str, changes: Arguments, message: str) -> None:
    with pytest.raises(IndexError, match=rf"{message} is not in \[0, "):
        getattr(STREAM, call)(**(good(call) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": np.zeros(1, np.int64)}, "rows: int32 wanted"),
        ({"counts": np.zeros(2, np.int32)}, "counts: shape"),
        ({"slot_table": np.zeros(16, np.int32)}, "slot_table: two dimensions"),
        ({"slot_table": np.zeros((4, 16), np.int32)[:, ::2]}, "slot_table: a contiguous array"),
    ],
)
def test_plans_of_arrays_that_do_not_fit(changes: Arguments, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        plan(**changes)


@pytest.mark.parametrize("changes", [{"req_slots": 1}, {"positions": 14}, {"positions": -1}, {"rows": -1}])
def test_plans_beside_the_slot_table(changes: dict[str, int]) -> None:
    with pytest.raises(IndexError, match="beside the slot table"):
        plan(**{name: np.array([value], np.int32) for name, value in changes.items()})


def test_biases_that_do_not_fit() -> None:
    for biases, message in (
        ([torch.zeros(39)], "40 elements"),
        ([], "one or None"),
        ([torch.zeros(40).half()], "f"),
    ):
        with pytest.raises(ValueError, match=f"^biases: {message}"):
            LinearGroup([MATRIX], biases)


def test_bytes_that_are_not_the_matrix() -> None:
    with pytest.raises(ValueError, match=r"^source: 68 bytes are no 1 x 3 rows"):
        STREAM.pack(np.zeros(68, np.uint8), int(Type.Q8_0), (3, 32))


def test_a_parameter_and_a_tensor_that_wants_gradients_are_tensors() -> None:
    arguments = good("norm") | {"weight": torch.nn.Parameter(torch.ones(HIDDEN))}
    STREAM.norm(**arguments)
    STREAM.wait()
