"""The operators of torch.ops.moeserve: arguments and results. This is the only table of operators; the registration,
the argument checks and docs/reference/operators/ read it. Needs no torch."""

from __future__ import annotations

from typing import NamedTuple


class Argument(NamedTuple):
    """An operator's argument. form: a tensor's dtype and shape, such as "float32 [n, cols]", where equal names are
    equal numbers within a call; or "weight", the list that `operators.weight` returns; or "any"; or a Python type. cpu:
    the tensor is on the CPU even if the operator runs on a GPU."""

    form: str
    meaning: str
    cpu: bool = False


class Operator(NamedTuple):
    schema: str
    does: str
    arguments: dict[str, Argument]
    gives: str
    reference: str  # specification in plain torch
    source: str  # publication
    example: str  # Python code, run by a test; it ends with an assertion
    raises: str = "ValueError for a tensor of another type or shape, or that is not contiguous."


ROW_TYPE = "ggml's number of the type, as `moeserve.quantization` has it"

OPERATORS = {
    "embed": Operator(
        "(Tensor ids, Tensor[] table, int kind, int cols) -> Tensor",
        "Rows of a quantised table.",
        {
            "ids": Argument("int32 [n]", "rows, each of the table"),
            "table": Argument("weight", "[rows, cols]"),
            "kind": Argument("int", ROW_TYPE),
            "cols": Argument("int", "columns of the table"),
        },
        "float32 [n, cols]",
        "moeserve/kernels/embed/reference.py",
        "",
        """\
table = operators.weight(torch.randn(5, 32).half().view(torch.uint8), 1, (5, 32), "cpu")  # 1: float16
rows = torch.ops.moeserve.embed(torch.tensor([4, 0], dtype=torch.int32), table, 1, 32)
assert rows.shape == (2, 32)
""",
    ),
    "norm": Operator(
        "(Tensor x, Tensor weight, float eps) -> Tensor",
        "RMSNorm of each row: x / sqrt(mean(x^2) + eps) * weight.",
        {
            "x": Argument("float32 [n, cols]", ""),
            "weight": Argument("float32 [cols]", ""),
            "eps": Argument("float", ""),
        },
        "float32 [n, cols]",
        "moeserve/kernels/norm/reference.py",
        "Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467",
        """\
x = torch.randn(3, 64)
y = torch.ops.moeserve.norm(x, torch.ones(64), 1e-6)
assert torch.allclose(y, torch.nn.functional.rms_norm(x, (64,), eps=1e-6), atol=1e-5)
""",
    ),
    "linear": Operator(
        "(Tensor x, Tensor[] weight, int kind) -> Tensor",
        "x W^T of a quantised matrix. Activations are rounded to int8 per 32 columns or, many rows on a GPU, to 16-bit "
        "floats.",
        {
            "x": Argument("float32 [n, cols]", ""),
            "weight": Argument("weight", "[rows, cols]"),
            "kind": Argument("int", ROW_TYPE),
        },
        "float32 [n, rows]",
        "moeserve/kernels/linear/reference.py",
        "Dettmers et al. 2022 for integer products by blocks, https://arxiv.org/abs/2208.07339",
        """\
w = torch.randn(16, 64)
matrix = operators.weight(w.half().view(torch.uint8), 1, (16, 64), "cpu")  # 1: float16
x = torch.randn(3, 64)
assert torch.allclose(torch.ops.moeserve.linear(x, matrix, 1), x @ w.T, atol=0.1)
""",
    ),
    "rope_store": Operator(
        "(Tensor q, Tensor k, Tensor v, Tensor q_norm, Tensor k_norm, float eps, Tensor cos, Tensor sin, Tensor slots, "
        "Tensor(a!) keys, Tensor(b!) values) -> Tensor",
        "RMSNorm of each head of q and k, rotary position embedding, and k and v into a KV pool of one token a slot.",
        {
            "q": Argument("float32 [n, heads, dim]", "queries"),
            "k": Argument("float32 [n, kv_heads, dim]", "keys"),
            "v": Argument("float32 [n, kv_heads, dim]", "values"),
            "q_norm": Argument("float32 [dim]", "the norm's weight"),
            "k_norm": Argument("float32 [dim]", "the norm's weight"),
            "eps": Argument("float", "of both norms"),
            "cos": Argument("float32 [n, half]", "of each row's angles; half = dim / 2"),
            "sin": Argument("float32 [n, half]", "likewise"),
            "slots": Argument("int32 [n]", "each row's place in the pool"),
            "keys": Argument("float16 [slots, kv_heads, dim]", "the pool, written in place"),
            "values": Argument("float16 [slots, kv_heads, dim]", "the pool, written in place"),
        },
        "float32 [n, heads, dim]: q, normalised, rotated and divided by sqrt(dim)",
        "moeserve/kernels/rope/reference.py",
        "Su et al. 2021, https://arxiv.org/abs/2104.09864",
        """\
q, k, v = torch.randn(2, 4, 32), torch.randn(2, 2, 32), torch.randn(2, 2, 32)
keys, values = (torch.zeros(8, 2, 32, dtype=torch.float16) for _ in "kv")
angles, ones = torch.rand(2, 16), torch.ones(32)
slots = torch.tensor([5, 3], dtype=torch.int32)
torch.ops.moeserve.rope_store(q, k, v, ones, ones, 1e-6, angles.cos(), angles.sin(), slots, keys, values)
assert torch.equal(values[5], v[0].half())
""",
    ),
    "attention": Operator(
        "(Tensor q, Tensor keys, Tensor values, Tensor table, Tensor rows, Tensor counts, Tensor positions, "
        "Tensor req_slots) -> Tensor",
        "Causal attention of several sequences over a KV pool of one token a slot: chunks of prompts, and single rows "
        "of decoding.",
        {
            "q": Argument("float32 [n, heads, dim]", "queries, scaled: those of `rope_store`"),
            "keys": Argument("float16 [slots, kv_heads, dim]", "the pool, with the rows' own tokens"),
            "values": Argument("float16 [slots, kv_heads, dim]", "likewise"),
            "table": Argument("int32 [requests, length]", "slots of each request's positions"),
            "rows": Argument("int32 [sequences]", "first row of a sequence", cpu=True),
            "counts": Argument("int32 [sequences]", "its rows", cpu=True),
            "positions": Argument("int32 [sequences]", "its first row's position", cpu=True),
            "req_slots": Argument("int32 [sequences]", "its row of the table", cpu=True),
        },
        "float32 [n, heads * dim]",
        "moeserve/kernels/attention/reference.py",
        "Kwon et al. 2023, https://arxiv.org/abs/2309.06180; Ainslie et al. 2023, https://arxiv.org/abs/2305.13245; "
        "Dao 2023, https://arxiv.org/abs/2307.08691",
        """\
keys, values = (torch.randn(8, 2, 32).half() for _ in "kv")
q = torch.randn(3, 4, 32) / 32**0.5
one = lambda x: torch.tensor([x], dtype=torch.int32)
y = torch.ops.moeserve.attention(q, keys, values, torch.arange(3).int()[None], one(0), one(3), one(0), one(0))
assert torch.allclose(y[0, :32], values[0, 0].float(), atol=1e-3)  # the first row sees its own token alone
""",
    ),
    "piecewise_attention": Operator(
        "(Tensor q1, Tensor k1, Tensor q2, Tensor k2, Tensor v, int distance, bool causal, float? scale=None) "
        "-> (Tensor, Tensor)",
        "Attention whose scores are q1 k1^T where a key is less than `distance` behind its query, or ahead of it, and "
        "q2 k2^T beyond, under one softmax. It has gradients: of the first result with respect to the five tensors.",
        {
            "q1": Argument(
                "any",
                "[batch, heads, m, dim], float16, bfloat16 or float32, all tensors alike; at any strides",
            ),
            "k1": Argument("any", "[batch, kv_heads, n, dim]"),
            "q2": Argument("any", "as q1"),
            "k2": Argument("any", "as k1"),
            "v": Argument("any", "as k1"),
            "distance": Argument("int", "at least 0"),
            "causal": Argument(
                "bool", "a query sees no key ahead of it; the last query is at the last key's position"
            ),
            "scale": Argument("float", "of the scores; 1 / sqrt(dim) without one"),
        },
        "The result, [batch, heads, m, dim] in the inputs' type, and the scores' logsumexp, float32 [batch, heads, m]. "
        "A query that sees no key gives zeros and -inf.",
        "moeserve/kernels/operators/piecewise/reference.py",
        "FlagAttention's operator, https://github.com/FlagOpen/FlagAttention",
        """\
q1, k1, q2, k2, v = (torch.randn(1, 2, 10, 16, requires_grad=True) for _ in range(5))
y, _ = torch.ops.moeserve.piecewise_attention(q1, k1, q2, k2, v, 4, True)
y.sum().backward()
assert torch.equal(q2.grad[:, :, :4], torch.zeros(1, 2, 4, 16))  # the first four see no key that is 4 behind
""",
        "ValueError for shapes or types that do not fit, a head wider than 256 and a distance below 0.",
    ),
    "piecewise_attention_backward": Operator(
        "(Tensor q1, Tensor k1, Tensor q2, Tensor k2, Tensor v, Tensor out, Tensor lse, Tensor gradient, int distance, "
        "bool causal, float? scale=None) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        "The gradients of `piecewise_attention`, which autograd calls.",
        {
            **{
                name: Argument("any", "as given to `piecewise_attention`")
                for name in ("q1", "k1", "q2", "k2", "v")
            },
            "out": Argument("any", "its first result"),
            "lse": Argument("any", "its second result"),
            "gradient": Argument("any", "of its first result"),
            "distance": Argument("int", ""),
            "causal": Argument("bool", ""),
            "scale": Argument("float", ""),
        },
        "Gradients of q1, k1, q2, k2 and v, in their type",
        "moeserve/kernels/operators/piecewise/reference.py",
        "Dao 2023, https://arxiv.org/abs/2307.08691",
        """\
q, k, v = (torch.randn(1, 2, 6, 16) for _ in range(3))
y, lse = torch.ops.moeserve.piecewise_attention(q, k, q, k, v, 3, False)
ones = torch.ones_like(y)
gradients = torch.ops.moeserve.piecewise_attention_backward(q, k, q, k, v, y, lse, ones, 3, False)
assert [g.shape for g in gradients] == [q.shape] * 5
""",
        "ValueError as `piecewise_attention`.",
    ),
    "route": Operator(
        "(Tensor logits, int top_k) -> (Tensor, Tensor)",
        "The top_k experts of each row by softmax, and their weights, which sum to 1.",
        {
            "logits": Argument("float32 [n, experts]", "of the router"),
            "top_k": Argument("int", "experts of a row"),
        },
        "ids int32 [n, top_k], largest weight first, and weights float32 [n, top_k]",
        "moeserve/kernels/routing/reference.py",
        "Shazeer et al. 2017, https://arxiv.org/abs/1701.06538",
        """\
logits = torch.randn(3, 8)
ids, weights = torch.ops.moeserve.route(logits, 2)
assert torch.equal(ids.long(), logits.topk(2).indices)
""",
    ),
    "experts": Operator(
        "(Tensor x, Tensor ids, Tensor weights, Tensor[] gate, int gate_kind, Tensor[] up, int up_kind, "
        "Tensor[] down, int down_kind) -> Tensor",
        "A mixture of experts: sum over a row's experts of weight * down(silu(gate x) * up x). Activations are rounded "
        "as by `linear`.",
        {
            "x": Argument("float32 [n, hidden]", ""),
            "ids": Argument("int32 [n, top_k]", "those of `route`"),
            "weights": Argument("float32 [n, top_k]", "those of `route`"),
            "gate": Argument("weight", "[experts, ff, hidden]"),
            "gate_kind": Argument("int", ROW_TYPE),
            "up": Argument("weight", "[experts, ff, hidden]"),
            "up_kind": Argument("int", ROW_TYPE),
            "down": Argument("weight", "[experts, hidden, ff]"),
            "down_kind": Argument("int", ROW_TYPE),
        },
        "float32 [n, hidden]",
        "moeserve/kernels/experts/reference.py",
        "Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; Shazeer 2020, https://arxiv.org/abs/2002.05202",
        """\
matrix = lambda *shape: operators.weight((torch.randn(shape) / 8).half().view(torch.uint8), 1, shape, "cpu")
ids, weights = torch.ops.moeserve.route(torch.randn(3, 4), 2)
gate, up, down = matrix(4, 96, 64), matrix(4, 96, 64), matrix(4, 64, 96)
y = torch.ops.moeserve.experts(torch.randn(3, 64), ids, weights, gate, 1, up, 1, down, 1)
assert y.shape == (3, 64)
""",
    ),
    "silu_mul": Operator(
        "(Tensor gate, Tensor up) -> Tensor",
        "silu(gate) * up, in one kernel. Shapes broadcast and types promote as torch's.",
        {"gate": Argument("any", "at any strides"), "up": Argument("any", "at any strides")},
        "The broadcast shape, in the promoted type",
        "moeserve/kernels/operators/pointwise/library.py",
        "Shazeer 2020, https://arxiv.org/abs/2002.05202",
        """\
gate, up = torch.randn(3, 8), torch.randn(3, 8)
assert torch.allclose(torch.ops.moeserve.silu_mul(gate, up), torch.nn.functional.silu(gate) * up, atol=1e-6)
""",
        "ValueError for shapes that do not broadcast; TypeError for complex numbers; RuntimeError for a tensor that "
        "wants a gradient.",
    ),
    "swiglu_oai": Operator(
        "(Tensor gate, Tensor up) -> Tensor",
        "gpt-oss's activation: (up + 1) * gate * sigmoid(1.702 * gate) of a gate of at most 7 and an up within 7 of 0.",
        {"gate": Argument("any", "at any strides"), "up": Argument("any", "at any strides")},
        "The broadcast shape, in the promoted type",
        "moeserve/kernels/operators/pointwise/library.py",
        "OpenAI 2025, https://arxiv.org/abs/2508.10925",
        """\
assert torch.ops.moeserve.swiglu_oai(torch.zeros(2), torch.ones(2)).tolist() == [0.0, 0.0]
""",
        "As `silu_mul`.",
    ),
    "sigmoid_mul": Operator(
        "(Tensor x, Tensor gate) -> Tensor",
        "x * sigmoid(gate): what leaves attention through a gate.",
        {"x": Argument("any", "at any strides"), "gate": Argument("any", "at any strides")},
        "The broadcast shape, in the promoted type",
        "moeserve/kernels/operators/pointwise/library.py",
        "Qiu et al. 2025, https://arxiv.org/abs/2505.06708",
        """\
assert torch.ops.moeserve.sigmoid_mul(torch.ones(2), torch.zeros(1)).tolist() == [0.5, 0.5]
""",
        "As `silu_mul`.",
    ),
    "sample": Operator(
        "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seeds, Tensor positions) "
        "-> Tensor",
        "A token a row: top-k, top-p, min-p, then a draw that the row's seed and position determine.",
        {
            "logits": Argument("float32 [n, vocab]", ""),
            "temperature": Argument("float64 [n]", "0: the largest logit", cpu=True),
            "top_k": Argument("int32 [n]", "0: all", cpu=True),
            "top_p": Argument("float64 [n]", "1: all", cpu=True),
            "min_p": Argument("float64 [n]", "0: all", cpu=True),
            "seeds": Argument("int64 [n]", "", cpu=True),
            "positions": Argument("int64 [n]", "tokens drawn so far", cpu=True),
        },
        "int32 [n]",
        "moeserve/kernels/sampling/reference.py",
        "Holtzman et al. 2019, https://arxiv.org/abs/1904.09751; Salmon et al. 2011 for the generator, "
        "https://doi.org/10.1145/2063384.2063405",
        """\
logits, zeros = torch.randn(2, 100), torch.zeros(2)
tokens = torch.ops.moeserve.sample(
    logits, zeros.double(), zeros.int(), zeros.double() + 1, zeros.double(), zeros.long(), zeros.long()
)
assert torch.equal(tokens.long(), logits.argmax(-1))
""",
    ),
}
