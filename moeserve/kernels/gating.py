"""What becomes of a gate's and an up's product. Code without torch may hold it."""

from __future__ import annotations

from typing import Literal

# silu: silu(gate) * up. gelu: gelu(gate) * up, by its tanh form. swiglu_oai: gpt-oss's, see `reference.activate`.
Activation = Literal["silu", "swiglu_oai", "gelu"]
