"""A vocabulary of Gemma's kind, trained for the tests, and texts for it."""

from __future__ import annotations

import json

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTROLS = ["<pad>", "<eos>", "<bos>", "<|turn>", "<turn|>"]
USER_DEFINED = ["<|tool_call>", "<|tool_response>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CORPUS = ["Hello  world, how are you?\n\nI am   here.\n", "def f(x):\n    return x\n\n\n", "été 12 345"] * 9
TEXTS = [
    "Hello world",
    "  two  spaces \n\n\n line\n",
    "日本 é 🙂 unknown",
    "<|turn>user\nHi<turn|>\n",
    "<|tool_call>call:f{}",
    "",
]


def theirs() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<pad>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    # In training alone: Gemma's vocabulary has no token with a line end and anything else.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[*CONTROLS, *USER_DEFINED, *BYTES], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    fresh = Tokenizer(
        models.BPE(model["vocab"], merges, byte_fallback=True, unk_token="<pad>", fuse_unk=True)
    )
    fresh.normalizer = tokenizer.normalizer
    fresh.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fresh.add_tokens([AddedToken(text, normalized=False) for text in (*CONTROLS, *USER_DEFINED)])
    return fresh
