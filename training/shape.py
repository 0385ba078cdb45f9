"""The sizes of the packaged model: what is trained, exported, and what it says about itself."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

CHAT_TEMPLATE: Final = Path(__file__).with_name("chat_template.jinja")


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen3-MoE. Every width is a multiple of 32, Q8_0's block and the CPU engine's lanes."""

    vocab: int = 1536
    hidden: int = 256
    layers: int = 6
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    experts: int = 16
    top_k: int = 4
    expert_width: int = 64
    context: int = 2048  # tokens
    rope_theta: float = 10_000.0
    rms_eps: float = 1e-6

    @property
    def parameters(self) -> int:
        """The embedding is the output matrix too, and counted once."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads) + 2 * self.head_dim
        experts = self.experts * self.hidden * (3 * self.expert_width + 1)
        layer = attention + experts + 2 * self.hidden
        return self.vocab * self.hidden + self.layers * layer + self.hidden

    @property
    def millions(self) -> int:
        return round(self.parameters / 1e6)


SHAPE = Shape()
