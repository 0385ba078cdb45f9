"""What llama.cpp's samplers leave of given logits, recorded for tests:
`python -m tests.support.worker.llama_cpp_samplers`.

It needs PyPI's llama-cpp-python, and the packaged model for its vocabulary. The record is a JSON file of cases. A case
of `chains` has logits, samplers in their order with their arguments, and what they leave: token ids by rising id with
their probabilities, or, where XTC decides by chance, how often each token was drawn. A case of `dry` has a text of
token ids, DRY's arguments, and what it subtracts from which tokens of logits that are all 0.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

MODEL = Path(__file__).resolve().parents[3] / "moeserve" / "assets" / "moeserve-demo-q8_0.gguf"
VOCAB = 48
DRAWS = 20_000
DEFAULT = ["top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"]
NEUTRAL: dict[str, Any] = {
    "top_n_sigma": 0.0,
    "top_k": 0,
    "typical_p": 1.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "temperature": 1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
}
CHAINS: list[dict[str, Any]] = [
    {"order": ["top_n_sigma"], "top_n_sigma": 0.7},
    {"order": ["top_n_sigma", "temperature"], "top_n_sigma": 1.5, "temperature": 2.0},
    {"order": ["top_k", "top_n_sigma"], "top_n_sigma": 1.0, "top_k": 12},
    {"order": ["typical_p"], "typical_p": 0.2},
    {"order": ["typical_p", "temperature"], "typical_p": 0.6, "temperature": 0.5},
    {"order": ["temperature", "typical_p"], "typical_p": 0.95, "temperature": 1.7},
    {"order": ["xtc"], "xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"order": ["xtc", "temperature"], "xtc_probability": 1.0, "xtc_threshold": 0.02, "temperature": 0.7},
    {"order": ["temperature", "xtc"], "xtc_probability": 1.0, "xtc_threshold": 0.05, "temperature": 0.7},
    {"order": ["min_p", "xtc"], "xtc_probability": 1.0, "xtc_threshold": 0.2, "min_p": 0.1},
    {"order": ["xtc"], "xtc_probability": 1.0, "xtc_threshold": 0.6},
    {"order": ["temperature", "min_p"], "min_p": 0.2, "temperature": 1.8},
    {"order": ["min_p", "temperature"], "min_p": 0.2, "temperature": 1.8},
    {"order": ["temperature", "top_k", "top_p"], "top_k": 9, "top_p": 0.8, "temperature": 0.6},
    {"order": ["top_p", "top_k", "temperature"], "top_k": 9, "top_p": 0.8, "temperature": 0.6},
    {"order": DEFAULT, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05},
    {
        "order": DEFAULT,
        "temperature": 1.5,
        "top_k": 30,
        "top_p": 0.97,
        "min_p": 0.01,
        "typical_p": 0.9,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.03,
    },
    # Not typical_p behind top_n_sigma: the tokens that this leaves out have llama.cpp's entropy become NaN.
    {
        "order": DEFAULT,
        "temperature": 1.5,
        "top_k": 30,
        "top_p": 0.97,
        "min_p": 0.01,
        "top_n_sigma": 2.0,
        "xtc_probability": 1.0,
        "xtc_threshold": 0.03,
    },
    {"order": ["xtc"], "xtc_probability": 0.4, "xtc_threshold": 0.05},
    {
        "order": ["temperature", "xtc", "top_k"],
        "xtc_probability": 0.7,
        "xtc_threshold": 0.1,
        "temperature": 0.6,
        "top_k": 8,
    },
]
DRY: list[dict[str, Any]] = [
    {"text": "one two three one two", "dry_multiplier": 0.8},
    {
        "text": "one two three four one two three",
        "dry_multiplier": 0.8,
        "dry_base": 2.0,
        "dry_allowed_length": 1,
    },
    {
        "text": "the cat sat. the cat ran. the cat sat. the cat",
        "dry_multiplier": 1.5,
        "dry_allowed_length": 1,
    },
    {"text": "one: two, one: two, one: two,", "dry_multiplier": 1.0, "breakers": [":"]},
    {"text": "one: two, one: two, one: two,", "dry_multiplier": 1.0, "breakers": []},
    {
        "text": "said the fox\nsaid the fox\nsaid the fox",
        "dry_multiplier": 1.0,
        "breakers": ["\n", ":", '"', "*"],
    },
    {
        "text": "a the end. b the end. c the end. d the",
        "dry_multiplier": 0.5,
        "breakers": ["the e"],
        "dry_allowed_length": 0,
    },
    {"text": "and so on and so on and so on and so on", "dry_multiplier": 2.0, "dry_penalty_last_n": 8},
    {"text": " go" * 40, "dry_multiplier": 0.1, "dry_base": 1.2},
    {"text": "x y z", "dry_multiplier": 1.0},
    {"text": "one two one two one two", "dry_multiplier": 1.0, "dry_allowed_length": 9},
]


class Row:
    """Logits as llama.cpp's samplers take them."""

    def __init__(self, logits: np.ndarray) -> None:
        self.data = (llama_cpp.llama_token_data * len(logits))()
        for token, logit in enumerate(logits):
            self.data[token] = llama_cpp.llama_token_data(token, float(logit), 0.0)
        self.array = llama_cpp.llama_token_data_array(self.data, len(logits), -1, False)

    def left(self) -> dict[int, float]:
        """The logit of each token that is left, by rising id."""
        found = {self.array.data[i].id: self.array.data[i].logit for i in range(self.array.size)}
        return {token: found[token] for token in sorted(found) if found[token] > -np.inf}


def chain_of(case: dict[str, Any], seed: int) -> Any:
    chain = llama_cpp.llama_sampler_chain_init(llama_cpp.llama_sampler_chain_default_params())
    for name in case["order"]:
        one = {
            "top_n_sigma": lambda: llama_cpp.llama_sampler_init_top_n_sigma(case["top_n_sigma"] or -1.0),
            "top_k": lambda: llama_cpp.llama_sampler_init_top_k(case["top_k"]),
            "typical_p": lambda: llama_cpp.llama_sampler_init_typical(case["typical_p"], 0),
            "top_p": lambda: llama_cpp.llama_sampler_init_top_p(case["top_p"], 0),
            "min_p": lambda: llama_cpp.llama_sampler_init_min_p(case["min_p"], 0),
            "xtc": lambda: llama_cpp.llama_sampler_init_xtc(
                case["xtc_probability"], case["xtc_threshold"], 0, seed
            ),
            "temperature": lambda: llama_cpp.llama_sampler_init_temp(case["temperature"]),
        }[name]()
        llama_cpp.llama_sampler_chain_add(chain, one)
    return chain


def record_chain(given: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    case = NEUTRAL | given
    logits = np.round(rng.normal(0, 2, VOCAB), 3).astype(np.float32)
    case["logits"] = [round(float(logit), 3) for logit in logits]
    chain = chain_of(case, seed=1)
    if 0 < case["xtc_probability"] < 1:
        llama_cpp.llama_sampler_chain_add(chain, llama_cpp.llama_sampler_init_dist(2))
        drawn = np.zeros(VOCAB, int)
        for _ in range(DRAWS):
            row = Row(logits)
            llama_cpp.llama_sampler_apply(chain, ctypes.byref(row.array))
            drawn[row.array.data[row.array.selected].id] += 1
        return case | {"drawn": drawn.tolist()}
    row = Row(logits)
    llama_cpp.llama_sampler_apply(chain, ctypes.byref(row.array))
    left = row.left()
    weights = np.exp(np.array([*left.values()]) - max(left.values()))
    return case | {"ids": [*left], "probabilities": np.round(weights / weights.sum(), 6).tolist()}


def record_dry(given: dict[str, Any], vocabulary: Any) -> dict[str, Any]:
    case: dict[str, Any] = {
        "dry_base": 1.75,
        "dry_allowed_length": 2,
        "dry_penalty_last_n": -1,
        "breakers": [],
        **given,
    }
    text = case["text"].encode()
    room = (llama_cpp.llama_token * 1024)()
    count = llama_cpp.llama_tokenize(vocabulary, text, len(text), room, 1024, False, False)
    case["tokens"] = room[:count]
    breakers = [breaker.encode() for breaker in case["breakers"]]
    sampler = llama_cpp.llama_sampler_init_dry(
        vocabulary,
        *(case["dry_multiplier"], case["dry_base"], case["dry_allowed_length"]),
        count if case["dry_penalty_last_n"] < 0 else case["dry_penalty_last_n"],
        (ctypes.c_char_p * len(breakers))(*breakers),
        len(breakers),
    )
    for token in case["tokens"]:
        llama_cpp.llama_sampler_accept(sampler, token)
    row = Row(np.zeros(llama_cpp.llama_vocab_n_tokens(vocabulary), np.float32))
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(row.array))
    return case | {"penalties": {str(t): round(-x, 5) for t, x in row.left().items() if x}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(MODEL).encode(), params)
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    rng = np.random.default_rng(0)
    record: dict[str, Any] = {
        "llama_cpp_python": llama_cpp.__version__,
        "chains": [record_chain(case, rng) for case in CHAINS for _ in range(3)],
        "dry": [record_dry(case, vocabulary) for case in DRY],
    }
    chains, dry = (",\n".join(map(json.dumps, record[key])) for key in ("chains", "dry"))
    version = json.dumps(record["llama_cpp_python"])
    output.write_text(f'{{"llama_cpp_python": {version},\n"chains": [\n{chains}\n],\n"dry": [\n{dry}\n]}}\n')


if __name__ == "__main__":
    main()
