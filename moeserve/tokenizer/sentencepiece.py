"""SentencePiece's BPE as GGUF files have it (`tokenizer.ggml.model` is "llama": Llama 2, Mistral 7B, Mixtral): it has
no merges, but a score for each token.

Among all neighbouring pairs whose joined text is a token, the pair with the highest score is joined first. A BPE with
merges, ordered by the scores of the joined tokens, gives the same result.
"""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.models.sources.source import ModelSource

from .vocabulary import BYTE_PIECES, Vocabulary

MAX_CHARACTERS = 256  # of one token that is made by joining; the longest in use have 48
MAX_SPLITS = 1 << 22  # ways to split the tokens in two, of all of them; Mixtral has 200,000

_SCORES = "tokenizer.ggml.scores"
_TOKENS = "tokenizer.ggml.tokens"


def merges_of_scores(
    gguf: ModelSource, pieces: Sequence[str], vocabulary: Vocabulary
) -> list[tuple[str, str]]:
    """Returns the pairs of tokens that join to a token, best first. Control tokens are neither parts nor results, so
    that typed text never becomes one by joining. Raises ModelError for scores that are missing or not numbers, and for
    more or longer tokens than are supported."""
    scores = gguf.metadata.require_floats(_SCORES, len(pieces)).tolist()
    others = vocabulary.special | vocabulary.user_defined | vocabulary.unused
    joinable = {p: i for i, p in enumerate(pieces) if i not in others and p not in BYTE_PIECES}
    longest = max(joinable, key=len, default="")
    if len(longest) > MAX_CHARACTERS:
        raise gguf.metadata.error(
            _TOKENS, f"holds one of {len(longest)} characters; {MAX_CHARACTERS} at most are supported"
        )
    if (splits := sum(map(len, joinable))) > MAX_SPLITS:
        raise gguf.metadata.error(_TOKENS, f"has {splits} characters; {MAX_SPLITS} at most are supported")
    # Runs of spaces have one score: there the leftmost pair is joined first, so that the left part grows.
    ranked = [
        (-scores[whole], -at, whole, left, right)
        for piece, whole in joinable.items()
        for at in range(1, len(piece))
        if (left := piece[:at]) in joinable and (right := piece[at:]) in joinable
    ]
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
