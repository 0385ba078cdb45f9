"""A next-token block of two layers, attention and experts, as Nemotron 3's folders have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.models.next_token import has_next_token_block
from moeserve.models.open import open_folder
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.gguf import names as n
from moeserve.worker.loading import drafting
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.kernels.families.transformers_logits import TOKENS
from tests.kernels.weights import nmse
from tests.support.models.hugging_face_model import write_family
from tests.support.models.rounded_kv import round_kv
from tests.support.worker.foreseen_drafts import ANSWER, asked
from tests.support.worker.served_answers import load, lose_at, serve
from tests.worker.drafts.next_token_rows import Drafting

ATTENTION, EXPERTS = 2, 5  # of the layers M E * - M E
EPS = 1e-5


class Folder:
    """A tiny model, whose block has the weights of another one's layers."""

    def __init__(self, path: Path) -> None:
        self.path, self.other = path / "tiny", path / "other"
        self.model_class = write_family(self.path, "nemotron_h", torch.float32)
        write_family(self.other, "nemotron_h", torch.float32, seed=8)
        files = self.other.glob("*.safetensors")
        stored = {name: value for file in files for name, value in load_file(file).items()}
        block = {
            f"mtp.layers.{number}." + name.split(".", 3)[3]: value
            for number, layer in enumerate((ATTENTION, EXPERTS))
            for name, value in stored.items()
            if name.split(".")[1:3] == ["layers", str(layer)]
        }
        hidden = len(block["mtp.layers.0.norm.weight"])
        generator = torch.Generator().manual_seed(9)
        norms = ("layers.0.enorm", "layers.0.hnorm", "layers.1.final_layernorm")
        self.enorm, self.hnorm, self.last = (
            1 + 0.2 * torch.randn(hidden, generator=generator) for _ in norms
        )
        self.eh_proj = 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)
        own = zip(norms, (self.enorm, self.hnorm, self.last), strict=True)
        block |= {f"mtp.{name}.weight": value for name, value in own}
        block |= {"mtp.layers.0.eh_proj.weight": self.eh_proj}
        self.block = block

    def save(self) -> None:
        """Adds the block, which transformers would complain of."""
        save_file(self.block, self.path / "model-mtp.safetensors")
        (self.path / "model.safetensors.index.json").unlink(missing_ok=True)

    def truth(self, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        """float32 [len(tokens) - 1, vocab]: row p, of the trunk's state at p and token p + 1. Before `save`."""
        model, other = (self._read(path, monkeypatch) for path in (self.path, self.other))
        seen: dict[str, Any] = {}
        model.model.layers[ATTENTION].register_forward_pre_hook(
            lambda module, args, options: seen.update(options), with_kwargs=True
        )
        with torch.no_grad():
            model(torch.tensor([tokens[:-1]]), use_cache=False)
            seen.pop("hidden_states", None)
            states = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[:, :-1]
            token = model.get_input_embeddings()(torch.tensor([tokens[1:]]))
            x = torch.cat([norm(token, self.enorm), norm(states, self.hnorm)], -1) @ self.eh_proj.T
            for layer in (ATTENTION, EXPERTS):
                x = other.model.layers[layer](x, **seen)
                x = x[0] if isinstance(x, tuple) else x
            logits: torch.Tensor = model.lm_head(norm(x, self.last))[0]
        return logits

    def _read(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        model = self.model_class.from_pretrained(path, dtype=torch.float32)
        round_kv(model, monkeypatch)
        return model


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * weight


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def test_what_torch_computes(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = folder.truth(TOKENS[:40], monkeypatch)
    folder.save()
    drafting = Drafting(folder.path, TOKENS[:40])
    logits = torch.stack([drafting.logits(row) for row in range(1, 40)])
    assert nmse(logits, truth) < 3e-7
    assert torch.equal(logits.argmax(-1), truth.argmax(-1))


def test_its_drafts_leave_the_text_as_it_is(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside recurrent layers."""
    monkeypatch.setattr(drafting, "least_probability", lambda _config: 0.0)
    folder.save()
    plain = build_cpu_runner(load(folder.path))
    requests = asked(3, plain.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    mtp = load(folder.path, speculative_config='{"method": "auto", "num_speculative_tokens": 3}')
    found, report = serve(build_cpu_runner(mtp), requests, 3, lose_at(6))
    assert found == expected
    assert report.draft_tokens > ANSWER


def test_blocks_that_files_divide_are_not_read(folder: Folder) -> None:
    """As llama.cpp's converter writes them: the second layer has the last norm."""
    folder.save()
    source = open_folder(folder.path)
    shape = read_checked_shape(source)
    assert has_next_token_block(shape, source)
    layers = shape.num_layers
    divided = dict(source.tensors)
    divided[n.of_layer(layers + 1, n.NEXTN_HEAD_NORM)] = divided.pop(n.of_layer(layers, n.NEXTN_HEAD_NORM))
    source.tensors = divided
    assert not has_next_token_block(shape, source)
