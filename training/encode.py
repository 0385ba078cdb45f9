"""Examples as token ids: through the chat template and the tokenizer that the server uses."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.chat_template import ChatTemplate
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from training.text.example import Example
from training.text.mixture import example

# What the prompt's tokens count beside the answer's: a little, for words are learnt from them, too.
PROMPT_WEIGHT: Final = 0.05


class Encoder:
    """Texts, and with a tokenizer ids, of examples."""

    def __init__(self, tokenizer: TextTokenizer | None, template: str) -> None:
        self._tokenizer = tokenizer
        self._template = ChatTemplate(template, {})

    @classmethod
    def from_gguf(cls, path: Path) -> Encoder:
        gguf = open_gguf(path)
        return cls(TextTokenizer.from_gguf(gguf), gguf.metadata.require_str("tokenizer.chat_template"))

    @property
    def end(self) -> int:
        """The token that ends an answer."""
        assert self._tokenizer is not None
        return self._tokenizer.vocabulary.eos_ids[0]

    def text(self, one: Example) -> tuple[str, str]:
        """The prompt as the server makes it, and what the model is to write after it."""
        kwargs = {} if one.enable_thinking is None else {"enable_thinking": one.enable_thinking}
        prompt = self._template.render(one.messages, tools=list(one.tools) or None, kwargs=kwargs)
        thought = "" if one.enable_thinking is False else f"<think>\n{one.thought}\n</think>\n\n"
        return prompt, f"{thought}{one.completion}<|im_end|>"

    def encode(self, one: Example) -> tuple[list[int], list[int]]:
        """The ids of `text`: the two encoded apart, as they will be."""
        prompt, completion = self.text(one)
        return self.ids(prompt), self.ids(completion)

    def ids(self, text: str) -> list[int]:
        assert self._tokenizer is not None
        return self._tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        return self._tokenizer.decode(ids)


class Batch(NamedTuple):
    """Rows of one step, of similar length. weights[i, t] is what predicting ids[i, t + 1] counts."""

    ids: Tensor  # int64 [rows, length], 0 behind the end
    weights: Tensor  # float32 [rows, length]


class Steps(Dataset[list[Batch]]):
    """Step i's examples, whatever worker makes them: a function of the seed and i. Sorted by length and cut into
    batches of at most `max_tokens`, padding included, so that little is padding; step's gradients are summed."""

    def __init__(
        self, vocabulary: Path, steps: int, examples: int, max_tokens: int, context: int, seed: int = 0
    ) -> None:
        self._vocabulary, self._steps, self._examples = vocabulary, steps, examples
        self._max_tokens, self._context, self._seed = max_tokens, context, seed
        self._encoder: Encoder | None = None  # made in the worker

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> list[Batch]:
        self._encoder = self._encoder or Encoder.from_gguf(self._vocabulary)
        rng = Random(f"{self._seed}/{index}")
        encoded = [self._encoder.encode(example(rng)) for _ in range(self._examples)]
        rows = sorted((row for row in encoded if sum(map(len, row)) <= self._context), key=_length)
        batches, batch = [], rows[:0]
        for row in rows:
            if batch and _padded(_length(row)) * (len(batch) + 1) > self._max_tokens:
                batches.append(_collate(batch))
                batch = []
            batch.append(row)
        return [*batches, _collate(batch)]


Row = tuple[list[int], list[int]]  # prompt, completion


def _length(row: Row) -> int:
    return len(row[0]) + len(row[1])


def _padded(length: int) -> int:
    return -(-length // 32) * 32


def _collate(rows: list[Row]) -> Batch:
    longest = _padded(max(map(_length, rows)))
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    weights = torch.zeros(len(rows), longest)
    for i, (prompt, completion) in enumerate(rows):
        size = len(prompt) + len(completion)
        ids[i, :size] = torch.tensor(prompt + completion)
        weights[i, : len(prompt) - 1] = PROMPT_WEIGHT
        weights[i, len(prompt) - 1 : size - 1] = 1.0
    return Batch(ids, weights)
