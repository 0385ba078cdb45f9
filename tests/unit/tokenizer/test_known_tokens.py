"""What the vocabulary of a model tells of the tokens that end its answers."""

from __future__ import annotations

from moeserve.tokenizer.known_tokens import turn_ends


def test_ends_of_turns_are_found_in_the_vocabulary() -> None:
    """Kimi-K3's, whose tokenizer names the end of a text as the end of everything."""
    assert turn_ends({"<|open|>": 1, "<|end_of_msg|>": 2, "[EOS]": 3}) == ["<|end_of_msg|>"]
    assert turn_ends({"<|im_start|>": 1, "<|im_end|>": 2}) == ["<|im_end|>"]
