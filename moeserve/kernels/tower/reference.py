"""The specification of a tower's operations between products, in float64. Nothing is rounded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm (https://arxiv.org/abs/1607.06450). x [n, cols]; weight and bias [cols]. Returns [n, cols]. Computed in
    float64. eps: added to the variance under the root."""
    return functional.layer_norm(x.double(), x.shape[-1:], weight.double(), bias.double(), eps)


def split_heads(
    product: Tensor, bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, heads: int
) -> Tensor:
    """Adds the bias, divides rows into q, k and v by head, and rotates q and k in split halves (RoPE,
    https://arxiv.org/abs/2104.09864). product [n, 3 * cols]; bias [3 * cols]; cos and sin [n, cols / heads / 2], None
    without rotation. Returns [3, n, heads, cols / heads]."""
    found = product.double() if bias is None else product.double() + bias.double()
    found = found.view(len(product), 3, heads, -1).transpose(0, 1).contiguous()
    if cos is None or sin is None:
        return found
    first, second = found[:2].chunk(2, dim=-1)
    turn, back = cos.double()[:, None], sin.double()[:, None]
    rotated = torch.cat([first * turn - second * back, second * turn + first * back], -1)
    return torch.cat([rotated, found[2:]])


def gelu(product: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """Returns gelu(product + bias) (https://arxiv.org/abs/1606.08415). product [n, cols]; bias [cols]; approximate:
    "none", or "tanh" for the approximation by tanh."""
    found = product.double() if bias is None else product.double() + bias.double()
    return functional.gelu(found, approximate=approximate)


def add_product(x: Tensor, product: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x + product + bias. x and product [n, cols]; bias [cols]."""
    found = x.double() + product.double()
    return found if bias is None else found + bias.double()
