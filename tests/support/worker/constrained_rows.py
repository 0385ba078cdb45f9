"""The worker's part that samples, with the tiny model's vocabulary and random logits."""

from __future__ import annotations

import json
import math

import numpy as np
import torch

from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.spec import JsonSchema
from moeserve.grammar.translate import to_grammar
from moeserve.messages.reasoning import Thinking
from moeserve.messages.sampling import SamplingParams
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.constraints.slot_guides import Constraints
from moeserve.worker.engines.cpu.sampler import CpuSampler
from tests.conftest import TINY_MODEL

SLOTS = 4
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "size"],
    "additionalProperties": False,
}
GRAMMAR = to_grammar(JsonSchema(json.dumps(SCHEMA)))
TOKENIZER = TextTokenizer.from_gguf(open_gguf(TINY_MODEL))
VOCAB = TOKENIZER.vocabulary.size
EOS = TOKENIZER.vocabulary.eos_ids
(OPEN,) = TOKENIZER.encode("<think>")
(CLOSE,) = TOKENIZER.encode("</think>")
ENDING = tuple(TOKENIZER.encode("\n</think>\n\n"))
NONE = np.zeros(0, np.int32)


class World:
    """The part of the worker that samples: a step is a row of random logits for each slot given."""

    def __init__(self, compilation_wait: float = 60.0, mask_wait: float = 60.0) -> None:
        self.constraints = Constraints(SLOTS, lambda: GrammarEngine(TOKENIZER), compilation_wait, mask_wait)
        self.sampler = CpuSampler(SLOTS, VOCAB)

    def bind(self, slot: int, params: SamplingParams, output: list[int] | None = None) -> None:
        known = np.array(output or [], np.int32)
        self.sampler.bind(slot, params, NONE, known)
        self.constraints.bind(slot, params, known)

    def step(
        self, *slots: int, prefer: tuple[int, ...] = (), computed_s: float = math.inf
    ) -> tuple[list[int], dict[int, str]]:
        at = np.array(slots, np.int32)
        logits = torch.zeros(len(slots), VOCAB)
        logits[:, list(prefer)] = 50.0
        tokens, _ = self.sampler.sample(logits, at, self.constraints.masks_for(at, computed_s))
        self.verdicts = self.constraints.verdicts(at)
        self.constraints.accept(at, tokens, self.verdicts)
        return tokens.tolist(), self.verdicts.failed

    def wait(self, slot: int) -> None:
        """Until it is known what may come next."""
        assert self.constraints._thread.wait(self.constraints._answers[slot], 30)

    def run(self, slot: int, output: list[int] | None = None, limit: int = 400) -> list[int]:
        """Until an end token comes."""
        output = list(output or [])
        while len(output) < limit:
            (token_id,), failed = self.step(slot)
            assert not failed
            if token_id in EOS:
                return output
            output.append(token_id)
        raise AssertionError("no end")


def params(seed: int = 0, grammar: str = GRAMMAR, thought: Thinking | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=400, seed=seed, grammar=grammar, thinking=thought)
