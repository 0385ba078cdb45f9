"""llama.cpp's log-probabilities of given tokens: `python llama_cpp_scores.py MODEL IN.json OUT.json`.

IN: {"windows": [[token, ...], ...], "prompts": [[token, ...], ...], "answer": n, "texts": [text, ...]}. OUT:
"windows": of each window the log-probability of every token but the first; "answers": of each prompt n greedy tokens
and the margin of each, its logit's distance from the second; "tokens": of each text its ids, without tokens before it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama  # type: ignore[import-not-found]  # in the environment of `make test-real`

CONTEXT = 1024


class Scorer:
    def __init__(self, model: str) -> None:
        self._llama = Llama(
            model,
            n_ctx=CONTEXT,
            n_batch=CONTEXT,
            n_threads=2,
            n_threads_batch=2,
            logits_all=True,
            verbose=False,
        )

    def _logits(self, count: int) -> np.ndarray:
        """float64 [count, vocab]: of the last positions that were computed."""
        end = self._llama.n_tokens
        found: np.ndarray = self._llama.scores[end - count : end]
        return found.astype(np.float64)

    def scores(self, tokens: list[int]) -> list[float]:
        self._llama.reset()
        self._llama.eval(tokens[:-1])
        logits = self._logits(len(tokens) - 1)
        log_sums = np.logaddexp.reduce(logits, axis=1)
        found: list[float] = (logits[np.arange(len(logits)), tokens[1:]] - log_sums).tolist()
        return found

    def greedy(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        self._llama.reset()
        self._llama.eval(prompt)
        found = []
        for _ in range(count):
            (row,) = self._logits(1)
            second, first = np.partition(row, -2)[-2:]
            found.append((int(row.argmax()), float(first - second)))
            self._llama.eval([found[-1][0]])
        return found

    def tokens(self, text: str) -> list[int]:
        ids: list[int] = self._llama.tokenize(text.encode(), add_bos=False, special=False)
        return ids


def main() -> None:
    model, source, target = sys.argv[1:]
    asked, scorer = json.loads(Path(source).read_text()), Scorer(model)
    found = {
        "tokens": [scorer.tokens(text) for text in asked["texts"]],
        "windows": [scorer.scores(window) for window in asked["windows"]],
        "answers": [scorer.greedy(prompt, asked["answer"]) for prompt in asked["prompts"]],
    }
    Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
