"""The sizes of a shortlist: the part of the vocabulary that is scored for a draft of the next-token block.

The head's rows are scored in panels of PANEL_ROWS. `worker/drafts/shortlist.py` chooses the panels.
"""

from __future__ import annotations

from typing import Final

from moeserve.kernels._C import PANEL_ROWS

LEAST_VOCABULARY: Final = 1 << 15  # smaller vocabularies are scored whole
FREQUENT: Final = 8  # the first 1/8 of the vocabulary is always scored


def frequent_tokens(vocab_size: int) -> int:
    """Returns how many of the first tokens are always scored: a multiple of PANEL_ROWS, or all."""
    if vocab_size < LEAST_VOCABULARY:
        return vocab_size
    return -(-vocab_size // (FREQUENT * PANEL_ROWS)) * PANEL_ROWS


def most_panels(vocab_size: int) -> int:
    """Returns the maximum number of panels in a shortlist: half of all; 0 if the whole vocabulary is scored."""
    return 0 if vocab_size < LEAST_VOCABULARY else -(-vocab_size // PANEL_ROWS) // 2
