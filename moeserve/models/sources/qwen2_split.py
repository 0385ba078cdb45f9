"""How Qwen2's and Qwen3's tokenizers cut a text before BPE."""

from __future__ import annotations

# Of Qwen2's published tokenizer.json: contractions, words with one leading mark, single digits, runs of punctuation,
# line ends, trailing blanks.
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
