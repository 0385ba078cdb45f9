"""A model whose answer to every prompt is a given text, token by token: what parsers make of an answer is tried through
the whole server.

Its one layer adds nothing. A token's embedding is one of a few directions, and the head maps each direction to the next
piece of the script: the prompt's last token to the first piece, each piece to the next, the last one to the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from gguf import GGUFWriter

from moeserve.tokenizer.vocabulary import byte_alphabet

WIDTH: Final = 256  # the longest script has a piece less
HEAD_DIM: Final = 128
EXPERTS: Final = 4
CONTEXT: Final = 4096
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
_CONTROLS: Final = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_ALPHABET: Final = byte_alphabet()

TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}FORMAT{% endif %}<|im_start|>assistant\nBEGIN"
)


def chat_template(marks: str, begins: str = "") -> str:
    """Returns a template that has the marks of a format, and that begins the answer with `begins`."""
    return TEMPLATE.replace("FORMAT", marks).replace("BEGIN", begins)


def write_scripted_model(
    path: Path,
    script: Sequence[str],
    template: str,
    *,
    controls: Sequence[str] = _CONTROLS,
    whole: Sequence[str] = ("<think>", "</think>"),
    end: str = "<|im_end|>",
    kinds: Mapping[str, int] | None = None,
) -> Path:
    """`script`: pieces that differ from each other, and from the prompt's last token. `whole` are user-defined tokens,
    `kinds` overrides what the file calls tokens."""
    pieces = {text: _ALPHABET[byte] for byte, text in enumerate(map(chr, range(128)))}
    tokens, types = [*_ALPHABET, "ĠĠ"], [NORMAL] * 257
    for texts, kind in ((controls, CONTROL), (whole, USER_DEFINED)):
        pieces |= dict(zip(texts, texts, strict=True))
        tokens += texts
        types += [kind] * len(texts)
    for text in script:
        if text not in pieces:
            pieces[text] = "".join(_ALPHABET[byte] for byte in text.encode())
            tokens.append(pieces[text])
            types.append(NORMAL)
    for text, kind in (kinds or {}).items():
        types[tokens.index(text)] = kind
    order = [tokens.index(pieces[text]) for text in script]
    assert len(set(order)) == len(order) < WIDTH, "the script's pieces must differ"
    writer = GGUFWriter(path, "qwen3moe")
    _add_metadata(writer, tokens, types, tokens.index(end), template)
    _add_tensors(writer, order, tokens.index(end), len(tokens))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(
    writer: GGUFWriter, tokens: Sequence[str], types: Sequence[int], end: int, template: str
) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_expert_feed_forward_length(WIDTH)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(2)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(types))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_eos_token_id(end)
    writer.add_chat_template(template)


def _add_tensors(writer: GGUFWriter, order: Sequence[int], end: int, size: int) -> None:
    embedding, head = np.zeros((2, size, WIDTH), np.float32)
    embedding[:, 0] = 1
    for place, token_id in enumerate(order):
        embedding[token_id] = 0
        embedding[token_id, place + 1] = 1
    for place, token_id in enumerate([*order, end]):
        head[token_id, place] = 10
    writer.add_tensor("token_embd.weight", embedding)
    writer.add_tensor("output.weight", head)
    for name, width in (("output_norm", WIDTH), ("blk.0.attn_norm", WIDTH), ("blk.0.ffn_norm", WIDTH)):
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    for name in ("attn_q_norm", "attn_k_norm"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(HEAD_DIM, np.float32))
    writer.add_tensor("blk.0.ffn_gate_inp.weight", np.zeros((EXPERTS, WIDTH), np.float32))
    shapes = {
        "attn_q": (2 * HEAD_DIM, WIDTH),
        "attn_k": (HEAD_DIM, WIDTH),
        "attn_v": (HEAD_DIM, WIDTH),
        "attn_output": (WIDTH, 2 * HEAD_DIM),
        **{f"ffn_{part}_exps": (EXPERTS, WIDTH, WIDTH) for part in ("gate", "up", "down")},
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros(shape, np.float16))
