"""Random EAGLE-3 heads in both published forms, and what they compute, by torch: after the published modelling code
(https://github.com/SafeAILab/EAGLE), in float32, with k and v rounded as the KV cache has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGUFWriter
from safetensors.torch import save_file
from torch import Tensor

HEADS, KV_HEADS, HEAD_DIM, WIDTH, THETA, EPS = 4, 2, 32, 192, 5e5, 1e-5
LAYER: Final = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTSIDE: Final = {"fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd"}


class Head:
    """A head for a model of `hidden` numbers and `vocab` tokens."""

    def __init__(
        self,
        hidden: int,
        vocab: int,
        taps: list[int],
        *,
        scored: int | None = None,
        has_embedding: bool = False,
        norm_before_residual: bool = False,
        has_more_norms: bool = False,
    ) -> None:
        """scored: tokens that it scores, spread over the vocabulary; None: all, in their order. has_more_norms: before
        `fc`, and of the states that rows behind drafts read."""
        self.hidden, self.vocab, self.taps, self.before = hidden, vocab, taps, norm_before_residual
        generator = torch.Generator().manual_seed(11)

        def random(*shape: int, scale: float = 0.08) -> Tensor:
            return scale * torch.randn(*shape, generator=generator)

        q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
        norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        self.layer = {name: 1 + random(hidden, scale=0.2) for name in norms}
        for name, shape in (
            ("self_attn.q_proj", (q, 2 * hidden)), ("self_attn.k_proj", (kv, 2 * hidden)),
            ("self_attn.v_proj", (kv, 2 * hidden)), ("self_attn.o_proj", (hidden, q)),
            ("mlp.gate_proj", (WIDTH, hidden)), ("mlp.up_proj", (WIDTH, hidden)), ("mlp.down_proj", (hidden, WIDTH)),
        ):  # fmt: skip
            self.layer[name] = random(*shape)
        self.outside = {"fc": random(hidden, len(taps) * hidden), "norm": 1 + random(hidden, scale=0.2)}
        self.has_more_norms = has_more_norms
        if has_more_norms:
            self.outside["input_norm"] = 1 + random(len(taps) * hidden, scale=0.2)
        self.outside["lm_head"] = random(scored or vocab, hidden, scale=0.3)
        if has_embedding:
            self.outside["embed_tokens"] = random(vocab, hidden, scale=0.3)
        self.ids = None if scored is None else torch.arange(scored) * vocab // scored

    def write_folder(self, path: Path, **changes: Any) -> Path:
        """As SGLang's training code writes it."""
        path.mkdir()
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": self.hidden,
            "intermediate_size": WIDTH, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM, "num_hidden_layers": 1, "vocab_size": self.vocab, "rms_norm_eps": EPS,
            "rope_theta": THETA, "max_position_embeddings": 2048, "hidden_act": "silu", "attention_bias": False,
            "draft_vocab_size": len(self.outside["lm_head"]), "norm_before_residual": self.before,
            "norm_before_fc": self.has_more_norms, "norm_output": self.has_more_norms,
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in self.taps], "use_aux_hidden_state": True,
            },
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps(config | changes))
        tensors = {f"midlayer.{name}.weight": value for name, value in self.layer.items()}
        tensors |= {f"{name}.weight": value for name, value in self.outside.items()}
        if self.ids is not None:
            tensors["d2t"] = self.ids - torch.arange(len(self.ids))
            is_scored = torch.zeros(self.vocab, dtype=torch.bool)
            is_scored[self.ids] = True
            tensors["t2d"] = is_scored
        save_file({name: value.contiguous() for name, value in tensors.items()}, path / "model.safetensors")
        return path

    def write_speculators(self, path: Path) -> Path:
        """As the speculators library writes it."""
        self.write_folder(path)
        config = json.loads((path / "config.json").read_text())
        for name in ("architectures", "eagle_config", "draft_vocab_size", "norm_before_residual"):
            config.pop(name)
        whole = {
            "architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3",
            "transformer_layer_config": config, "draft_vocab_size": len(self.outside["lm_head"]),
            "norm_before_residual": self.before,
            "eagle_aux_hidden_state_layer_ids": self.taps, "target_hidden_size": None,
        }  # fmt: skip
        (path / "config.json").write_text(json.dumps(whole))
        return path

    def write_gguf(self, path: Path) -> Path:
        """As llama.cpp's converter writes it, without the model's tokenizer."""
        writer = GGUFWriter(path, "eagle3")
        for key, number in {
            "block_count": 1, "context_length": 2048, "embedding_length": self.hidden, "feed_forward_length": WIDTH,
            "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": HEAD_DIM,
            "attention.value_length": HEAD_DIM, "rope.dimension_count": HEAD_DIM, "vocab_size": self.vocab,
            "target_hidden_size": self.hidden,
        }.items():  # fmt: skip
            writer.add_uint32(f"eagle3.{key}", number)
        writer.add_float32("eagle3.rope.freq_base", THETA)
        writer.add_float32("eagle3.attention.layer_norm_rms_epsilon", EPS)
        writer.add_array("eagle3.target_layers", self.taps)
        writer.add_bool("eagle3.norm_before_residual", self.before)
        for name, value in self.layer.items():
            heads = {"self_attn.q_proj": HEADS, "self_attn.k_proj": KV_HEADS}.get(name)
            writer.add_tensor(
                f"blk.0.{LAYER[name]}.weight", (value if heads is None else in_pairs(value, heads)).numpy()
            )
        for name, value in self.outside.items():
            writer.add_tensor(f"{OUTSIDE[name]}.weight", value.numpy())
        if self.ids is not None:
            writer.add_tensor("d2t", self.ids.numpy().astype(np.int64))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    # ---------------------------------------------------------------- what it computes

    def states(self, residuals: list[Tensor]) -> Tensor:
        """residuals: [n, hidden], before each of the taps. Gives [n, hidden]."""
        joined = torch.cat(residuals, dim=-1)
        if self.has_more_norms:
            joined = normed_rows(joined, self.outside["input_norm"])
        return joined @ self.outside["fc"].T

    def row(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The last row of a text: the residual behind the layer [hidden], and the scores of the next token [scored].

        embeddings: [n, hidden] of tokens 1 .. n; states: [n, hidden], of positions 0 .. n-1."""
        w, n = self.layer, len(states)
        normed = normed_rows(states, w["hidden_norm"])
        inputs = torch.cat([normed_rows(embeddings, w["input_layernorm"]), normed], dim=-1)
        q, k, v = (inputs @ w[f"self_attn.{name}_proj"].T for name in "qkv")
        q = rotated(q.view(n, HEADS, HEAD_DIM))[-1]
        k = rotated(k.view(n, KV_HEADS, HEAD_DIM)).half().float().repeat_interleave(HEADS // KV_HEADS, 1)
        v = v.view(n, KV_HEADS, HEAD_DIM).half().float().repeat_interleave(HEADS // KV_HEADS, 1)
        shares = (torch.einsum("hd,nhd->hn", q, k) / HEAD_DIM**0.5).softmax(dim=-1)
        attended = torch.einsum("hn,nhd->hd", shares, v).reshape(-1) @ w["self_attn.o_proj"].T
        x = (normed if self.before else states)[-1] + attended
        y = normed_rows(x, w["post_attention_layernorm"])
        gate, up = (y @ w[f"mlp.{name}_proj"].T for name in ("gate", "up"))
        x = x + (torch.nn.functional.silu(gate) * up) @ w["mlp.down_proj"].T
        return x, normed_rows(x, self.outside["norm"]) @ self.outside["lm_head"].T

    def chain(self, embedding: Tensor, text: list[int], states: Tensor, depths: int) -> list[Tensor]:
        """The scores of the drafts behind a text, each row behind the first with the draft of the one before.
        embedding: the model's [vocab, hidden]; states: of the text's positions but the last."""
        table = self.outside.get("embed_tokens", embedding)
        embeddings, found = table[torch.tensor(text[1:])], []
        for _ in range(depths):
            x, scores = self.row(embeddings, states)
            found.append(scores)
            best = int(scores.argmax())
            token = best if self.ids is None else int(self.ids[best])
            if self.has_more_norms:
                x = normed_rows(x, self.outside["norm"])
            embeddings, states = (
                torch.cat([embeddings, table[token : token + 1]]),
                torch.cat([states, x[None]]),
            )
        return found


def normed_rows(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


def rotated(x: Tensor) -> Tensor:
    """x: [n, heads, dim], of positions 0 .. n-1."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def in_pairs(rows: Tensor, heads: int) -> Tensor:
    """The rows of a head's two halves in turn, as llama.cpp rotates them."""
    by_half = rows.view(heads, 2, HEAD_DIM // 2, -1)
    return by_half.transpose(1, 2).reshape(rows.shape).contiguous()
