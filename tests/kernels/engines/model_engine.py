"""The CPU engine over a model file without a server, and its distance from the truth."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGMLQuantizationType as Type

from moeserve.kernels.attention.reference import Sequence
from moeserve.kernels.cpu_stream import CpuStream
from moeserve.kernels.disk_experts import Reading
from moeserve.kernels.stream_operands import StateSequences
from moeserve.kv.cache import KvCache
from moeserve.kv.layout import FLOAT16, KvDtype, KvLayout
from moeserve.kv.slot_kinds import slot_kinds
from moeserve.kv.states import StateCache
from moeserve.messages.slot_kinds import SlotKind, first_slots, kind_of
from moeserve.models.blocks.cpu.decoder import CpuDecoder
from moeserve.models.blocks.cpu.disk_experts import CpuDiskExperts, has_experts_on_disk
from moeserve.models.blocks.cpu.workspace import CpuBatch
from moeserve.models.cpu_step_buffers import CPU_LOGIT_ROWS
from moeserve.models.interface import ModelShape
from moeserve.models.loading.cpu_loader import CpuLoader
from moeserve.models.next_token import with_next_token_block
from moeserve.models.open import open_model
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import GGUFFile
from moeserve.models.sources.gguf import names as n
from moeserve.placement.expert_cache.policy import DECAY
from tests.conftest import OWN_FIXTURES, TINY_MODEL
from tests.kernels.operations import stream_of
from tests.kernels.weights import dequantize

if TYPE_CHECKING:
    from transformers import Qwen3MoeForCausalLM

MAX_TOKENS = 512
STATE_SLOT = 1


class Engine:
    """A model on a stream, driven by hand: one sequence at a time, its KV in the slots after the last one's."""

    def __init__(
        self,
        stream: CpuStream,
        path: Path,
        *,
        in_place: bool = False,
        kv_dtype: KvDtype = FLOAT16,
        drafts: bool = False,
        slots: int | None = None,
        repeats_steps: bool = False,
        slots_by_kind: bool = False,
    ) -> None:
        """drafts: with the model's next-token block. slots: of each layer's experts in RAM, the others on disk.
        repeats_steps: see `CpuDecoder`. slots_by_kind: positions have slots as a router gives them, see
        `messages/slot_kinds.py`."""
        self.file = open_model(path)  # in place, the weights are in it
        self.config = c = read_shape(self.file)
        if drafts:
            self.config = c = with_next_token_block(c, self.file)
        self.stream = stream
        of_layers = None if slots is None else [slots] * c.num_layers
        weights = CpuLoader(stream, self.file, c, lambda *_: None, in_place, of_layers).load()
        layers = range(len(c.loaded_layers))
        layout = KvLayout(c, kv_dtype)
        kinds = slot_kinds(layout, MAX_TOKENS, 1) if slots_by_kind else ()
        self.slots = _slots_by_kind(kinds) if kinds else None
        self.kv = kv = KvCache(
            layout, MAX_TOKENS, layers, kinds=kinds, num_states=2, step_rows=MAX_TOKENS
        ).layers
        states = StateCache(KvLayout(c), 2, range(c.num_layers)).layers
        disk = None
        if has_experts_on_disk(weights.layers):
            disk = CpuDiskExperts(stream, c, weights.layers, Reading(4, 4096, DECAY))
        sizes = MAX_TOKENS, MAX_TOKENS
        self.model = CpuDecoder(
            c, weights, stream, kv, *sizes, states=states, disk=disk, repeats_steps=repeats_steps
        )

    def logits(
        self,
        tokens: list[int],
        chunk: int = MAX_TOKENS,
        *,
        start: int = 0,
        positions: torch.Tensor | None = None,
        clears: bool = True,
    ) -> torch.Tensor:
        """float32 [len(tokens) - start, vocab]: the prediction at every position from `start` on, of which the earlier
        ones' KV is there. positions: int [3, len(tokens)] of RoPE, by section; None: the tokens' numbers. clears: the
        state is that of a sequence without tokens."""
        slots = self.slots
        if slots is None:
            slots = torch.randperm(MAX_TOKENS, generator=torch.Generator().manual_seed(len(tokens))).int()
        if clears:
            self.model.copy_states(torch.tensor([[-1, STATE_SLOT]], dtype=torch.int32))
        found = []
        for first in range(start, len(tokens), chunk):
            part = tokens[first : first + chunk]
            self.model.forward(
                self._batch(
                    *(part, Sequence(0, len(part), first, slots), self._previous(tokens, first, len(part))),
                    positions,
                )
            )
            for row in range(0, len(part), CPU_LOGIT_ROWS):
                rows = torch.arange(row, min(row + CPU_LOGIT_ROWS, len(part)), dtype=torch.int32)
                logits = self.model.logits(rows)
                self.stream.wait()
                found.append(logits.clone())
        return torch.cat(found)

    def _previous(self, tokens: list[int], first: int, count: int) -> npt.NDArray[np.int32] | None:
        """See `NgramHashes.rows`; None for a model without n-gram embeddings."""
        if self.config.ngrams is None:
            return None
        known = np.array([-1] * MAX_TOKENS + tokens, np.int32)
        ages = range(1, self.config.ngrams.hashes.size)
        at = MAX_TOKENS + first
        return np.stack([known[at - age : at - age + count] for age in ages], axis=1)

    def _batch(
        self,
        tokens: list[int],
        s: Sequence,
        previous: npt.NDArray[np.int32] | None = None,
        positions: torch.Tensor | None = None,
    ) -> CpuBatch:
        one = [np.array([value], np.int32) for value in (s.row, s.count, s.position, 0)]
        self._table = s.slots.numpy()[None]  # the plan points into it
        self.model.begin(torch.tensor(tokens, dtype=torch.int32), previous=previous)
        self.model.plan_attention(*one, self._table, state_slots=np.array([STATE_SLOT], np.int32))
        numbers, firsts = torch.arange(s.position, s.position + s.count, dtype=torch.int32), None
        if positions is not None:
            assert self.config.indexer is not None
            block = self.config.indexer.rule.block
            firsts = positions[:, numbers // block * block].int()
        return CpuBatch(
            n=s.count,
            positions=numbers if positions is None else positions[:, numbers].int(),
            first_positions=firsts,
            kv_slots=s.slots[s.position : s.position + s.count].clone(),
            states=StateSequences(*(torch.tensor([v], dtype=torch.int32) for v in (0, s.count, STATE_SLOT))),
        )


def _slots_by_kind(kinds: list[SlotKind]) -> torch.Tensor:
    """int32 [MAX_TOKENS]: the slot of each position, the last ones of its kind first."""
    needed = [kind_of(kinds, position) for position in range(MAX_TOKENS)]
    first = first_slots(kinds)
    left = [first[kind] + needed.count(kind) for kind in range(len(first))]
    slots = []
    for kind in needed:
        left[kind] -= 1
        slots.append(left[kind])
    return torch.tensor(slots, dtype=torch.int32)


@dataclass(frozen=True)
class Fixture:
    """NAME.golden.json and NAME.truth.npz: see tests/fixtures/README.md."""

    model: Path
    tokens: list[list[int]]
    truth: list[torch.Tensor]
    llama_cpp: dict[str, float]

    @classmethod
    def load(cls, model: Path, folder: Path) -> Fixture:
        golden = json.loads((folder / f"{model.stem}.golden.json").read_text())
        truth = np.load(folder / f"{model.stem}.truth.npz", allow_pickle=False)
        return cls(
            model,
            [case["tokens"] for case in golden["cases"]],
            [torch.from_numpy(truth[f"case{i}"].astype(np.float64)) for i in range(len(golden["cases"]))],
            golden["llama_cpp_vs_truth"],
        )


def own_fixture() -> Fixture:
    return Fixture.load(TINY_MODEL, OWN_FIXTURES)


def distance(truth: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """KL(truth || ours) in nats, and whether the most likely token is the same, at each position. The truth is kept in
    float16, in which several tokens may be the most likely: each of them is right."""
    p, q = truth.double().log_softmax(-1), logits.double().log_softmax(-1)
    chosen = truth.gather(-1, logits.argmax(-1, keepdim=True)).squeeze(-1)
    return (p.exp() * (p - q)).sum(-1), chosen == truth.amax(-1)


def distances(fixture: Fixture, isa: str, kv_dtype: KvDtype = FLOAT16) -> tuple[torch.Tensor, torch.Tensor]:
    """`distance` at all positions of all cases."""
    engine = Engine(stream_of(isa), fixture.model, kv_dtype=kv_dtype)
    found = [distance(t, engine.logits(ids)) for t, ids in zip(fixture.truth, fixture.tokens, strict=True)]
    kl, agrees = (torch.cat(column) for column in zip(*found, strict=True))
    return kl, agrees


def assert_no_further_from_the_truth_than_llama_cpp(fixture: Fixture, isa: str) -> None:
    kl, agrees = distances(fixture, isa)
    median, top1 = kl.median().item(), agrees.double().mean().item()
    theirs = fixture.llama_cpp
    print(f"{fixture.model.stem} {isa}: median KL {median:.2e} ({theirs['median_kl']:.2e}), top-1 {top1:.1%}")
    assert median <= theirs["median_kl"]
    assert top1 >= theirs["top1_agreement"] - 0.01


def hugging_face_model(file: GGUFFile, c: ModelShape) -> Qwen3MoeForCausalLM:
    """Qwen3MoeForCausalLM in float32 with the file's weights, dequantised by gguf-py."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        moe_intermediate_size=c.expert_width,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.heads.num_heads,
        num_key_value_heads=c.heads.num_kv_heads,
        head_dim=c.head_dim,
        num_experts=c.num_experts,
        num_experts_per_tok=c.top_k,
        norm_topk_prob=True,
        rms_norm_eps=c.rms_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        tie_word_embeddings=c.tied_embeddings,
    )

    def values(name: str) -> torch.Tensor:
        tensor = file.tensors[name]
        rows = file.data(name).reshape(*tensor.shape[:-1], -1)
        return torch.from_numpy(dequantize(Type(int(tensor.type)), rows).reshape(tensor.shape))

    state = {
        "model.embed_tokens.weight": values(n.TOKEN_EMBD),
        "model.norm.weight": values(n.OUTPUT_NORM),
        "lm_head.weight": values(n.OUTPUT),
    }
    for i in range(c.num_layers):
        prefix = f"model.layers.{i}."
        for theirs, ours in {
            "input_layernorm.weight": n.ATTN_NORM,
            "self_attn.q_proj.weight": n.ATTN_Q,
            "self_attn.k_proj.weight": n.ATTN_K,
            "self_attn.v_proj.weight": n.ATTN_V,
            "self_attn.o_proj.weight": n.ATTN_OUTPUT,
            "self_attn.q_norm.weight": n.ATTN_Q_NORM,
            "self_attn.k_norm.weight": n.ATTN_K_NORM,
            "post_attention_layernorm.weight": n.FFN_NORM,
            "mlp.gate.weight": n.FFN_GATE_INP,
            "mlp.experts.down_proj": n.FFN_DOWN_EXPS,
        }.items():
            state[prefix + theirs] = values(n.of_layer(i, ours))
        gate_up = [values(n.of_layer(i, part)) for part in (n.FFN_GATE_EXPS, n.FFN_UP_EXPS)]
        state[prefix + "mlp.experts.gate_up_proj"] = torch.cat(gate_up, dim=1)
    model = Qwen3MoeForCausalLM(config).float().eval()
    model.load_state_dict(state)
    return model
