#!/usr/bin/env python3
"""llama.cpp as a child of compare_llama_cpp.py: under the Python that has llama-cpp-python, which need not be ours.

Commands, a line each on standard input, one JSON answer each: `load PATH THREADS REPACK
CLOCK` (wall or cpu), `prefill N`, `decode STREAMS PROMPT STEPS`. Standard output holds nothing else.
"""

import ctypes
import json
import sys
import time

import llama_cpp as llama
import numpy as np

MOST_STREAMS = 64


class Model:
    def __init__(self, path: str, threads: int, repack: bool, clock: str) -> None:
        self.clock = time.process_time if clock == "cpu" else time.perf_counter
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 0
        params.use_extra_bufts = repack  # llama.cpp's weight repacking, its default
        start = time.perf_counter()
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        self.load_s = time.perf_counter() - start
        context = llama.llama_context_default_params()
        context.n_ctx = MOST_STREAMS * 256
        context.n_batch = context.n_ubatch = 512
        context.n_threads = context.n_threads_batch = threads
        context.n_seq_max = MOST_STREAMS
        context.kv_unified = True  # one cache for all streams: a single one may use it all
        self.context = llama.llama_init_from_model(self.model, context)
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.random = np.random.default_rng(0)

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def decode(self, rows: list[tuple[int, int, bool]]) -> None:
        """One call with rows (position, sequence, wants logits) of random tokens."""
        batch = llama.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (position, sequence, logits) in enumerate(rows):
            batch.token[i] = int(self.random.integers(0, self.vocab))
            batch.pos[i], batch.n_seq_id[i], batch.logits[i] = position, 1, logits
            batch.seq_id[i][0] = sequence
        if llama.llama_decode(self.context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        llama.llama_synchronize(self.context)
        llama.llama_batch_free(batch)

    def prefill(self, tokens: int) -> float:
        self.clear()
        start = self.clock()
        for first in range(0, tokens, 512):
            self.decode([(p, 0, p == tokens - 1) for p in range(first, min(first + 512, tokens))])
        return tokens / (self.clock() - start)

    def streams(self, count: int, prompt: int, steps: int) -> float:
        self.clear()
        for sequence in range(count):
            self.decode([(p, sequence, p == prompt - 1) for p in range(prompt)])
        start = self.clock()
        for step in range(steps):
            self.decode([(prompt + step, sequence, True) for sequence in range(count)])
        return count * steps / (self.clock() - start)


@llama.llama_log_callback  # type: ignore[untyped-decorator]
def silent(level: int, text: bytes, user: ctypes.c_void_p) -> None:
    """Its log would go between our answers."""


def main() -> None:
    llama.llama_log_set(silent, ctypes.c_void_p(0))
    llama.llama_backend_init()
    model: Model | None = None
    for line in sys.stdin:
        name, *args = line.split()
        if name == "load":
            model = Model(args[0], int(args[1]), args[2] == "1", args[3])
            answer = model.load_s
        elif model is None:
            raise SystemExit("load a model first")
        elif name == "prefill":
            answer = model.prefill(int(args[0]))
        else:
            answer = model.streams(*map(int, args))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
