"""A tiny GLM-5.3-Flash with a next-token block, and what torch computes of the block."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.models.glm5next_model import HIDDEN, LAYERS, new_model
from tests.support.models.hugging_face_model import tokenizer_files

EPS = 1e-6


class Glm5NextFolder:
    """A tiny model, whose block has the weights of another one's last layer, which chooses among all keys."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._model, other = new_model(10), new_model(11, index_topk=512)
        self._layer = other.model.language_model.layers[LAYERS - 1]
        other.save_pretrained(path / "other")
        generator = torch.Generator().manual_seed(9)
        self._norms = {
            part: 1 + 0.2 * torch.randn(HIDDEN, generator=generator)
            for part in ("enorm", "hnorm", "shared_head.norm")
        }
        self._eh_proj = 0.1 * torch.randn(HIDDEN, 2 * HIDDEN, generator=generator)
        last, under = (f"model.language_model.layers.{number}." for number in (LAYERS - 1, LAYERS))
        stored = {
            name: value
            for file in (path / "other").glob("*.safetensors")
            for name, value in load_file(file).items()
        }
        block = {
            under + name.removeprefix(last): value
            for name, value in stored.items()
            if name.startswith(last) and ".hc_" not in name
        }
        block |= {f"{under}{part}.weight": value for part, value in self._norms.items()}
        self._save(block | {f"{under}eh_proj.weight": self._eh_proj})

    def _save(self, block: dict[str, torch.Tensor]) -> None:
        self._model.save_pretrained(self.path, max_shard_size="1MB")
        for name, content in tokenizer_files().items():
            (self.path / name).write_bytes(content)
        save_file(block, self.path / "model-mtp.safetensors")
        (self.path / "model.safetensors.index.json").unlink(missing_ok=True)
        config = json.loads((self.path / "config.json").read_text())
        config["text_config"]["num_nextn_predict_layers"] = 1
        (self.path / "config.json").write_text(json.dumps(config))

    def truth(self, tokens: list[int]) -> torch.Tensor:
        """float32 [len(tokens) - 1, vocab]: row p, of the mean of the streams at p and token p + 1."""
        text, layer = self._model.model.language_model, self._layer
        enorm, hnorm, last = self._norms.values()
        with torch.inference_mode():
            states = text(torch.tensor([tokens]), use_cache=False).last_hidden_state[:, :-1]
            token = text.embed_tokens(torch.tensor([tokens[1:]]))
            x = torch.cat([norm(token, enorm), norm(states, hnorm)], -1) @ self._eh_proj.T
            ones = torch.ones(x.shape[:2], dtype=torch.bool)
            attended = layer.self_attn(
                hidden_states=layer.input_layernorm(x),
                attention_mask=ones,
                position_ids=torch.arange(x.shape[1])[None],
                position_embeddings=None,
            )
            x = x + attended[0]
            x = x + layer.mlp(layer.post_attention_layernorm(x))
            logits: torch.Tensor = self._model.lm_head(norm(x, last))[0]
        return logits


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight
