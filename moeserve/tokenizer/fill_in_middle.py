"""FimTokens: the tokens between which a model writes the middle of a text (fill-in-the-middle)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from moeserve.models.sources.source import ModelSource

from .vocabulary import Vocabulary

# Where files name them, newer keys first, and their texts in vocabularies whose files do not: Qwen's and CodeGemma's,
# StarCoder's and Granite's, DeepSeek's, CodeLlama's, GLM's, Falcon's.
_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "prefix": ("fim_pre_token_id", "prefix_token_id"),
    "suffix": ("fim_suf_token_id", "suffix_token_id"),
    "middle": ("fim_mid_token_id", "middle_token_id"),
    "pad": ("fim_pad_token_id",),
    "repository": ("fim_rep_token_id",),
    "separator": ("fim_sep_token_id",),
}
_TEXTS: Final[Mapping[str, tuple[str, ...]]] = {
    "prefix": (
        *("<|fim_prefix|>", "<fim_prefix>", "<fim-prefix>", "<｜fim▁begin｜>"),
        *("<PRE>", " <PRE>", "▁<PRE>", "<|code_prefix|>", "<|prefix|>"),
    ),
    "suffix": (
        *("<|fim_suffix|>", "<fim_suffix>", "<fim-suffix>", "<｜fim▁hole｜>"),
        *("<SUF>", " <SUF>", "▁<SUF>", "<|code_suffix|>", "<|suffix|>"),
    ),
    "middle": (
        *("<|fim_middle|>", "<fim_middle>", "<fim-middle>", "<｜fim▁end｜>"),
        *("<MID>", " <MID>", "▁<MID>", "<|code_middle|>", "<|middle|>"),
    ),
    "pad": ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>"),
    "repository": ("<|repo_name|>", "<|fim_repo|>", "<fim-repo>", "<reponame>", "<REPO>"),
    "separator": ("<|file_sep|>", "<file_sep>"),
}


@dataclass(frozen=True, slots=True)
class FimTokens:
    prefix: int
    suffix: int
    middle: int
    repository: int | None = None  # before the name of a repository
    separator: int | None = None  # before the name of each of its files
    pad: int | None = None

    @property
    def ends(self) -> tuple[int, ...]:
        """Returns the tokens that end a middle, in addition to the model's end tokens: after them another file or
        another gap would begin."""
        found = (self.prefix, self.suffix, self.middle, self.repository, self.separator, self.pad)
        return tuple(token for token in found if token is not None)

    @classmethod
    def from_gguf(cls, gguf: ModelSource, vocabulary: Vocabulary) -> FimTokens | None:
        """Returns None for a model without them. Raises ModelError for an id beyond the vocabulary."""
        wanted = {text.encode() for texts in _TEXTS.values() for text in texts}
        ids = {piece: token for token, piece in enumerate(vocabulary.token_bytes) if piece in wanted}

        def find(role: str) -> int | None:
            for key in (f"tokenizer.ggml.{key}" for key in _KEYS[role]):
                if key in gguf.metadata:
                    return gguf.metadata.require_int(key, 0, vocabulary.size - 1)
            return next((ids[text.encode()] for text in _TEXTS[role] if text.encode() in ids), None)

        prefix, suffix, middle = find("prefix"), find("suffix"), find("middle")
        if prefix is None or suffix is None or middle is None:
            return None
        return cls(prefix, suffix, middle, find("repository"), find("separator"), find("pad"))
