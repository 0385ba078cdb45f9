"""Served: the model and its limits at the time when a request arrives."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.httpserver.generation.chat.model_text import ModelText


@dataclass(frozen=True, slots=True)
class Served:
    text: ModelText
    limit: int  # tokens of the longest prompt plus answer
    vocab_size: int  # tokens that both the engine and the tokenizer have
    max_num_seqs: int  # generations that run at once
