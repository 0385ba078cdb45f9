"""A model that an EAGLE-3 head drafts for, by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch


class Target(NamedTuple):
    path: Path
    model: Any  # transformers'

    def residuals(self, tokens: list[int], taps: list[int]) -> list[torch.Tensor]:
        """float32 [tokens, hidden] before each of the layers `taps`."""
        seen: list[torch.Tensor] = []
        model = self.model.model
        places = [*model.layers, model.norm]
        hooks = [
            places[tap].register_forward_pre_hook(
                lambda _module, args, options: seen.append(args[0] if args else options["hidden_states"]),
                with_kwargs=True,
            )
            for tap in taps
        ]
        with torch.no_grad():
            self.model(torch.tensor([tokens]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return [each[0] for each in seen]
