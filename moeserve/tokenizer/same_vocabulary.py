"""Compares the vocabularies of two models, one of which drafts tokens for the other."""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from moeserve.models.errors import ModelError
from moeserve.models.sources.source import ModelSource

from .known_tokens import NORMAL
from .vocabulary import vocab_size

MOST_DIFFERENCES: Final = 128  # tokens that may differ, none of them of text; as many as in llama.cpp

_TOKENS: Final = "tokenizer.ggml.tokens"
_KINDS: Final = "tokenizer.ggml.token_type"
_SHOWN: Final = 40  # characters of a token in a message

log = logging.getLogger(__name__)


def check_same_vocabulary(model: ModelSource, drafting: ModelSource) -> None:
    """Raises ModelError unless both models use the same ids for all tokens of text.

    Up to MOST_DIFFERENCES control and padding tokens may differ, because releases of a family add some, and embeddings
    are padded. A drafted token of these is always rejected: the draft was made for nothing, and the text is the same.
    """
    sizes = vocab_size(model), vocab_size(drafting)
    ours, theirs = (list(source.metadata.require_strings(_TOKENS)) for source in (model, drafting))
    kinds = [
        source.metadata.require_ints(_KINDS, size)
        for source, size in zip((model, drafting), sizes, strict=True)
    ]
    common = min(sizes)
    is_text = (kinds[0][:common] == NORMAL) & (kinds[1][:common] == NORMAL)
    differing = np.array([one != other for one, other in zip(ours, theirs, strict=False)], np.bool_)
    of_text = np.flatnonzero(differing & is_text)
    if len(of_text):
        raise _different(model, drafting, int(of_text[0]), ours, theirs)
    num_different = int(differing.sum()) + max(sizes) - common
    if num_different > MOST_DIFFERENCES:
        first = int(np.flatnonzero(differing)[0]) if differing.any() else common
        raise _different(model, drafting, first, ours, theirs)
    if differing.any():
        first = int(np.flatnonzero(differing)[0])
        log.info(
            "%d control or padding tokens of the model that drafts differ; the first is %d, %s there and %s here",
            int(differing.sum()),
            first,
            _shown(theirs, first),
            _shown(ours, first),
        )


def _different(
    model: ModelSource, drafting: ModelSource, token: int, ours: list[bytes], theirs: list[bytes]
) -> ModelError:
    return ModelError(
        drafting.path,
        f"cannot draft for {model.path.name}, whose vocabulary is another: token {token} is {_shown(theirs, token)} "
        f"here and {_shown(ours, token)} there ({len(theirs)} and {len(ours)} tokens); choose a smaller model of the "
        "same family, or draft by look-up with "
        '--speculative-config {"method": "ngram", "num_speculative_tokens": 4}',
    )


def _shown(pieces: list[bytes], token: int) -> str:
    if token >= len(pieces):
        return "missing"
    return repr(pieces[token].decode("utf-8", "replace")[:_SHOWN])
