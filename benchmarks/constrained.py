"""What grammars cost: decoding throughput of constrained requests beside unconstrained ones.

    python -m benchmarks.constrained --model model.gguf [--batch 8] [--tokens 96] [--rounds 5]

Every round runs a batch of each kind, one after another, so that what the machine does meanwhile hits all of them;
the figures are medians of the rounds' ratios. "any text" is a grammar that allows everything but an end: it samples
nearly the same tokens as no grammar, and so shows the cost of the machinery alone. "JSON" is an endless array of
objects.
"""

from __future__ import annotations

import argparse
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.server import Server, running_server

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "no grammar": {"ignore_eos": True},
    "any text": {"guided_regex": "(?s:.*) which is the end of it"},
    "JSON": {"guided_json": {"type": "array", "items": ITEM, "minItems": 100_000}},
}


def tokens_per_second(server: Server, batch: int, tokens: int, seed: int, extra: dict[str, Any]) -> float:
    """Of all requests together, while all of them decode."""

    def ask(index: int) -> dict[str, Any]:
        body = {"prompt": "List some things:", "max_tokens": tokens, "temperature": 1.0, "seed": seed + index}
        answer = server.post("/v1/completions", body | extra, timeout=600)
        assert answer["usage"]["completion_tokens"] == tokens, "it ended by itself"
        return dict(answer["timings"])

    with ThreadPoolExecutor(batch) as pool:
        timings = list(pool.map(ask, range(batch)))
    return float(batch * (tokens - 1) / statistics.mean(timing["decode_ms"] for timing in timings) * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rates: dict[str, list[float]] = {name: [] for name in KINDS}
    with running_server(arguments.model, "--max-model-len", "4096", ready_timeout=300) as server:
        for extra in KINDS.values():  # warm up: the grammar's process, pages, caches
            tokens_per_second(server, arguments.batch, 8, 0, extra)
        for index in range(arguments.rounds):
            for name, extra in KINDS.items():
                seed = index * arguments.batch
                rate = tokens_per_second(server, arguments.batch, arguments.tokens, seed, extra)
                rates[name].append(rate)
    base = rates["no grammar"]
    for name, measured in rates.items():
        ratios = [rate / other for rate, other in zip(measured, base, strict=True)]
        figures = {
            "kind": name,
            "tokens_per_second": round(statistics.median(measured), 1),
            "of_no_grammar": round(statistics.median(ratios), 3),
            "ratios": [round(ratio, 3) for ratio in ratios],
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
