"""A next-token block of one stream behind layers whose residual has several: GLM-5.3-Flash's, beside what transformers
computes of the same weights, and its drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moeserve.worker.loading import drafting
from moeserve.worker.loading.cpu.load import build_cpu_runner
from tests.kernels.model_engine import distance
from tests.support.folder_as_gguf import write_gguf
from tests.support.foreseen_drafts import ANSWER, asked
from tests.support.glm5next_model import DENSE_UP_TO, HIDDEN, LAYERS, new_model
from tests.support.hugging_face_model import tokenizer_files
from tests.support.served_answers import load, lose_at, serve
from tests.worker.next_token_rows import Drafting

TOKENS = [(37 * i * i + 11 * i) % 600 for i in range(60)]
EPS = 1e-6
assert len(TOKENS) > DENSE_UP_TO  # so that the model chooses keys, and the block does not


class Folder:
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def truth(folder: Folder) -> torch.Tensor:
    return folder.truth(TOKENS)


@pytest.fixture(params=["folder", "GGUF"], name="path")
def _path(request: pytest.FixtureRequest, folder: Folder, tmp_path: Path) -> Iterator[Path]:
    if request.param == "folder":
        yield folder.path
    else:
        write_gguf(folder.path, tmp_path / "tiny.gguf")
        yield tmp_path / "tiny.gguf"


def test_what_torch_computes(path: Path, truth: torch.Tensor) -> None:
    drafting = Drafting(path, TOKENS)
    logits = torch.stack([drafting.logits(row) for row in range(1, len(TOKENS))])
    kl, agrees = distance(truth, logits)
    assert kl.median() < 1e-6
    assert agrees.all()


def test_stored_rows_are_those_that_were_predicted(folder: Folder) -> None:
    """Bit for bit, in chunks too."""
    one_by_one, stored = Drafting(folder.path, TOKENS), Drafting(folder.path, TOKENS)
    expected = [one_by_one.logits(row) for row in range(1, len(TOKENS))]
    stored.block.store(stored.rows(1, 7))
    stored.block.store(stored.rows(7, len(TOKENS) - 1))
    assert torch.equal(stored.logits(len(TOKENS) - 1), expected[-1])


def test_a_row_has_the_same_bits_in_a_crowd(folder: Folder) -> None:
    """Beside rows of two more requests with other keys."""
    drafting = Drafting(folder.path, TOKENS)
    last = len(TOKENS) - 1
    drafting.block.store(drafting.rows(1, last))
    alone = drafting.logits(last)
    tables = np.ascontiguousarray(
        np.stack([np.roll(drafting.kv_slots, shift)[1:] for shift in (3, 0, 9)]), np.int32
    )
    row = drafting.rows(last, last + 1)
    places = np.array([400, row.kv_slots[0], 401], np.int32)
    tables[[0, 2], last - 1] = places[[0, 2]]
    crowd = row._replace(
        token_ids=np.array([5, row.token_ids[0], 7], np.int32),
        states=torch.stack([row.states[0] * 0.5, row.states[0], -row.states[0]]),
        positions=np.repeat(row.positions, 3),
        kv_slots=places,
    )
    drafting.block.predict(crowd, np.arange(3, dtype=np.int32), tables)
    assert torch.equal(drafting.engine.model._space.logits[1], alone)


def test_its_drafts_leave_the_text_as_it_is(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafting, "least_probability", lambda _config: 0.0)
    plain = build_cpu_runner(load(folder.path))
    requests = asked(3, plain.ready().vocab_size, temperature=0.7)
    expected, _ = serve(plain, requests, 0)
    mtp = load(folder.path, speculative_config='{"method": "auto", "num_speculative_tokens": 3}')
    found, report = serve(build_cpu_runner(mtp), requests, 3, lose_at(6))
    assert found == expected
    assert report.draft_tokens > ANSWER
