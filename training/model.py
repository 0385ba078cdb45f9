"""Qwen3-MoE in plain torch, for training (Qwen3 technical report, https://arxiv.org/abs/2505.09388).

The same mathematics as `moeserve.models.qwen3moe`, held by a test. Each layer computes every expert and weighs with
zero those that were not chosen: at this size three large products cost less than gathering tokens by expert, and the
gradients are the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.shape import Shape


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q = nn.Linear(shape.hidden, width, bias=False)
        self.k = nn.Linear(shape.hidden, kv_width, bias=False)
        self.v = nn.Linear(shape.hidden, kv_width, bias=False)
        self.output = nn.Linear(width, shape.hidden, bias=False)
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.rms_eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.rms_eps)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        """x [rows, length, hidden]; causal."""
        split = (*x.shape[:2], -1, self.shape.head_dim)
        q = rotate(self.q_norm(self.q(x).view(split).float()), rope).transpose(1, 2)
        k = rotate(self.k_norm(self.k(x).view(split).float()), rope).transpose(1, 2)
        v = self.v(x).view(split).transpose(1, 2)
        attended = F.scaled_dot_product_attention(
            q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True
        )
        result: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return result


class Experts(nn.Module):
    """The experts' matrices lie side by side: expert e has rows e * ff … of gate and up, the same columns of down."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.experts * shape.expert_width
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.gate = nn.Linear(shape.hidden, width, bias=False)
        self.up = nn.Linear(shape.hidden, width, bias=False)
        self.down = nn.Linear(width, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Output [rows, length, hidden] and the router's probabilities, float32 [rows, length, experts]."""
        with torch.autocast(x.device.type, enabled=False):
            logits: Tensor = self.router(x.float())
        chosen, ids = logits.topk(self.shape.top_k)
        weights = torch.zeros_like(logits).scatter(-1, ids, chosen.softmax(-1))
        inner = (F.silu(self.gate(x)) * self.up(x)).unflatten(-1, (self.shape.experts, -1))
        inner = inner * weights.to(inner.dtype)[..., None]
        return self.down(inner.flatten(-2)), logits.softmax(-1)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.hidden, shape.rms_eps)
        self.attention = Attention(shape)
        self.experts_norm = nn.RMSNorm(shape.hidden, shape.rms_eps)
        self.experts = Experts(shape)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rope)
        update, probabilities = self.experts(self.experts_norm(x))
        return x + update, probabilities


class Model(nn.Module):
    """float32 weights; compute in bfloat16 under autocast."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocab, shape.hidden)  # the output matrix, too
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.rms_eps)
        half = shape.head_dim // 2
        frequencies = shape.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(shape.context)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)
        self._initialise()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """ids [rows, length]. Logits [rows, length, vocab] and all routers' probabilities, float32
        [layers, rows, length, experts]."""
        rope = self.cos[: ids.shape[1], None], self.sin[: ids.shape[1], None]
        x = self.embedding(ids)
        routed = []
        for layer in self.layers:
            x, probabilities = layer(x, rope)
            routed.append(probabilities)
        return F.linear(self.norm(x), self.embedding.weight), torch.stack(routed)

    def _initialise(self) -> None:
        nn.init.normal_(self.embedding.weight, std=0.02)
        for name, weight in self.named_parameters():
            if weight.dim() == 2 and name != "embedding.weight":
                # What is added to the residual stream begins small: 2 additions a layer.
                is_addition = name.endswith(("attention.output.weight", "experts.down.weight"))
                nn.init.normal_(weight, std=weight.shape[1] ** -0.5 * (0.3 if is_addition else 1.0))


def rotate(x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """RoPE over the halves, as Qwen has it. x [rows, length, heads, dim]; cos and sin [length, 1, dim / 2]."""
    cos, sin = rope
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def balance_loss(probabilities: Tensor, top_k: int, counts: Tensor) -> Tensor:
    """The load-balancing loss of Switch Transformers (https://arxiv.org/abs/2101.03961, eq. 4), for top-k: 1 when every
    expert of a layer gets the same share; the mean over layers.

    probabilities [layers, rows, length, experts]; counts bool [rows, length]: tokens that are no padding.
    """
    experts = probabilities.shape[-1]
    # Of each token in a mean; indexing would be slow backward.
    share = (counts / counts.sum()).to(probabilities.dtype)
    chosen = torch.zeros_like(probabilities).scatter(-1, probabilities.topk(top_k).indices, 1.0)
    is_chosen = torch.einsum("lrte,rt->le", chosen, share) / top_k
    return experts * (is_chosen * torch.einsum("lrte,rt->le", probabilities, share)).sum(-1).mean()


@torch.no_grad()
def generate(model: Model, prompts: list[list[int]], end: int, max_tokens: int) -> list[list[int]]:
    """Greedy answers without their end token. Everything is computed anew for each token: simple, and quick enough."""
    device = model.embedding.weight.device
    rows = [list(prompt) for prompt in prompts]
    going = list(range(len(rows)))
    for _ in range(max_tokens):
        if not going:
            break
        longest = max(len(rows[i]) for i in going)
        ids = torch.zeros(len(going), longest, dtype=torch.int64)
        for row, i in enumerate(going):
            ids[row, : len(rows[i])] = torch.tensor(rows[i])
        last = torch.tensor([len(rows[i]) - 1 for i in going])
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(ids.to(device))[0][torch.arange(len(going)), last]
        chosen = logits.argmax(-1).tolist()
        for i, token in zip(going, chosen, strict=True):
            rows[i].append(token)
        going = [
            i
            for i, token in zip(going, chosen, strict=True)
            if token != end and len(rows[i]) < model.shape.context
        ]
    return [
        row[len(prompt) :][: -1 if row[-1] == end else None]
        for row, prompt in zip(rows, prompts, strict=True)
    ]
