"""Tiny folders of transformers with a next-token block behind their layers or apart, and what it computes by torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.registry import FAMILIES
from moeserve.models.sources.huggingface.next_token_names import NextTokenNames
from tests.support.models.hugging_face_model import write_family
from tests.support.models.newest_families import NEWEST, round_attended, write_newest
from tests.support.models.rounded_kv import round_kv

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Cohere's: a layer with positions and experts that sees all, which the model itself lacks.
COHERE: dict[str, Any] = {
    "num_nextn_predict_layers": 1,
    "like": 1,
    "sees_like": 0,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"],
}


class NextTokenFolder:
    """A folder of `model_type` whose block has the weights of another model's last layer."""

    def __init__(
        self,
        folder: Path,
        model_type: str,
        like: int = -1,
        *,
        sees_like: int | None = None,
        before_norm: bool = False,
        **changes: Any,
    ) -> None:
        """like: number of the layer whose form the block has. sees_like: of the one whose mask it has; None: the same.
        before_norm: it reads states before the last norm."""
        self.path = folder / "tiny"
        self._before_norm = before_norm
        self._sees_like = like if sees_like is None else sees_like
        write = write_newest if model_type in NEWEST else write_family
        self._model_class = write(self.path, model_type, torch.float32, **changes)
        write(folder / "other", model_type, torch.float32, seed=8, **changes)
        self._other = folder / "other"
        family = next(
            family
            for family in FAMILIES.values()
            if family.hugging_face is not None and model_type in family.hugging_face.model_types
        )
        assert family.hugging_face is not None
        names = family.hugging_face.next_token
        assert names is not None
        self._adds_one = bool(family.hugging_face.less_one)  # norms are stored minus 1
        trunk, others = _tensors(self.path), _tensors(self._other)
        root = "model.language_model." if "model.language_model.norm.weight" in trunk else "model."
        numbers = [name.removeprefix(f"{root}layers.").split(".")[0] for name in trunk]
        self.layers = 1 + max(int(number) for number in numbers if number.isdigit())
        self._like = range(self.layers)[like]
        hidden = len(trunk[f"{root}norm.weight"])
        of_layer, *rest = names.prefixes or (f"{root}layers.{self.layers}.",)
        of_block = rest[0] if rest else of_layer
        last = f"{root}layers.{self._like}."
        block = {
            of_layer + _published(name.removeprefix(last), names): value
            for name, value in others.items()
            if name.startswith(last)
        }
        generator = torch.Generator().manual_seed(9)
        projection, *norms = names.parts  # of the token, the state and the head
        self.own = {part: 1 + 0.2 * torch.randn(hidden, generator=generator) for part in norms}
        self.own |= {projection: 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)}
        block |= {of_block + names.parts[part]: value for part, value in self.own.items()}
        self.tensors = block
        save_file(block, self.path / "model-mtp.safetensors")
        (self.path / "model.safetensors.index.json").unlink(missing_ok=True)

    def truth(self, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        """float32 [len(tokens) - 1, vocab]: row p, of the trunk's state at p and token p + 1."""
        model = self._read(self.path, monkeypatch)
        block = _text(self._read(self._other, monkeypatch)).layers[self._like]
        trunk = _text(model)
        seen: dict[str, Any] = {}
        before: list[torch.Tensor] = []
        trunk.layers[self._sees_like].register_forward_pre_hook(
            lambda module, args, options: seen.update(options), with_kwargs=True
        )
        trunk.norm.register_forward_pre_hook(lambda module, args: before.append(args[0]))
        with torch.no_grad():
            model(torch.tensor([tokens[:-1]]), use_cache=False)  # for a mask and positions of one row less
            options = {key: value for key, value in seen.items() if key != "hidden_states"}
            states = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[:, :-1]
            if self._before_norm:
                states = before[-1][:, :-1]
            of_token, of_state, of_head, projection = self.own
            token = self._norm(trunk.embed_tokens(torch.tensor([tokens[1:]])), of_token, model)
            x = torch.cat([token, self._norm(states, of_state, model)], -1) @ self.own[projection].T
            x = block(hidden_states=x, **options)
            x = x[0] if isinstance(x, tuple) else x
            logits: torch.Tensor = model.lm_head(self._norm(x, of_head, model))[0]
        return logits * getattr(model.config, "logit_scale", 1.0)

    def _read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> PreTrainedModel:
        # Its own tensors only: transformers would complain of the others.
        moved = self.path / "model-mtp.safetensors"
        aside = moved.with_suffix(".aside")
        moved.rename(aside)
        _write_index(path)
        try:
            model: PreTrainedModel = self._model_class.from_pretrained(path, dtype=torch.float32)
        finally:
            aside.rename(moved)
            (path / "model.safetensors.index.json").unlink()
        if hasattr(model.model, "language_model"):
            round_attended(model, monkeypatch)
        else:
            round_kv(model, monkeypatch)
        return model

    def _norm(self, x: torch.Tensor, part: str, model: PreTrainedModel) -> torch.Tensor:
        weight = self.own[part] + (1 if self._adds_one else 0)
        config: Any = model.config.get_text_config()
        eps = getattr(config, "rms_norm_eps", None) or getattr(config, "layernorm_epsilon", None)
        if eps is None:
            x, eps = x - x.mean(-1, keepdim=True), config.layer_norm_eps
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _text(model: PreTrainedModel) -> Any:
    return getattr(model.model, "language_model", model.model)


def _published(part: str, names: NextTokenNames) -> str:
    """The name of a layer's tensor as it is in a published block."""
    for theirs, ours in names.renamed.items():
        if part.startswith(ours):
            return theirs + part.removeprefix(ours)
    return part


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def _write_index(folder: Path) -> None:
    weights = {name: file.name for file in folder.glob("*.safetensors") for name in load_file(file)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
