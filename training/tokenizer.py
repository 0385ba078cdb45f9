"""The tokenizer: byte-level BPE over the training text, with Qwen2's split expression and Qwen3's special tokens.

    python -m training.tokenizer vocabulary.gguf

It is kept as a GGUF without tensors, as llama.cpp keeps its vocabularies, so that training reads it with the server's
own code. Digits are single tokens, by the split expression: numbers are read digit by digit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random
from typing import Final

from gguf import GGUFWriter
from gguf.constants import TokenType
from tokenizers import Tokenizer, trainers
from tokenizers.models import BPE

from moeserve.models.sources.gguf import GGUFFile, open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer, pre_tokenizer
from moeserve.tokenizer.vocabulary import byte_alphabet
from training.encode import Encoder
from training.shape import CHAT_TEMPLATE, SHAPE, Shape
from training.text.mixture import example

END_OF_TEXT: Final = "<|endoftext|>"
END_OF_TURN: Final = "<|im_end|>"
# Left out of the text of an answer; then what is part of it, but always one token. As in Qwen3's vocabulary.
CONTROL: Final = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
USER_DEFINED: Final = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<tools>", "</tools>",
)  # fmt: skip
NUM_EXAMPLES: Final = 20_000


def learn(
    size: int, seed: int = 0, num_examples: int = NUM_EXAMPLES
) -> tuple[list[str], list[tuple[str, str]]]:
    """The tokens as GGUF spells them, in id order, and the merges; `size` tokens in all."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(CONTROL) - len(USER_DEFINED),
        initial_alphabet=byte_alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(seed, num_examples), trainer)
    vocabulary = tokenizer.get_vocab()
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    merges = [(left, right) for left, right in _merges(tokenizer)]
    return [*pieces, *CONTROL, *USER_DEFINED], merges


def _texts(seed: int, num_examples: int) -> list[str]:
    """Without the special tokens, which are no part of any word."""
    encoder = Encoder(None, CHAT_TEMPLATE.read_text())
    texts = []
    for index in range(num_examples):
        prompt, completion = encoder.text(example(Random(f"{seed}/tokenizer/{index}")))
        text = prompt + completion
        for token in (*CONTROL, *USER_DEFINED):
            text = text.replace(token, " \n")
        texts.append(text)
    return texts


def _merges(tokenizer: Tokenizer) -> list[tuple[str, str]]:
    return [tuple(merge) for merge in json.loads(tokenizer.to_str())["model"]["merges"]]


def add_vocabulary(writer: GGUFWriter, pieces: list[str], merges: list[tuple[str, str]]) -> None:
    """The tokenizer's part of a GGUF's metadata."""
    kinds = dict.fromkeys(CONTROL, TokenType.CONTROL) | dict.fromkeys(USER_DEFINED, TokenType.USER_DEFINED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(pieces)
    writer.add_token_types([kinds.get(piece, TokenType.NORMAL) for piece in pieces])
    writer.add_token_merges([f"{left} {right}" for left, right in merges])
    writer.add_eos_token_id(pieces.index(END_OF_TURN))
    writer.add_pad_token_id(pieces.index(END_OF_TEXT))
    writer.add_bos_token_id(pieces.index(END_OF_TEXT))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE.read_text())


def read(vocabulary: GGUFFile) -> tuple[list[str], list[tuple[str, str]]]:
    """Pieces and merges of a GGUF, as `learn` gives them."""
    pieces = [piece.decode() for piece in vocabulary.metadata.require_strings("tokenizer.ggml.tokens")]
    merges = vocabulary.metadata.require_strings("tokenizer.ggml.merges")
    pairs = [merge.decode().split(" ") for merge in merges]
    return pieces, [(left, right) for left, right in pairs]


def write(path: Path, shape: Shape = SHAPE, seed: int = 0, num_examples: int = NUM_EXAMPLES) -> None:
    writer = GGUFWriter(path, "qwen3moe")
    add_vocabulary(writer, *learn(shape.vocab, seed, num_examples))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Learns the tokenizer and writes it as a GGUF without tensors."
    )
    parser.add_argument("output", type=Path)
    arguments = parser.parse_args()
    write(arguments.output)
    tokenizer = TextTokenizer.from_gguf(open_gguf(arguments.output))
    print(f"{arguments.output}: {tokenizer.vocabulary.size} tokens")


if __name__ == "__main__":
    main()
