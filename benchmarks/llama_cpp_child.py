#!/usr/bin/env python3
"""llama.cpp as a child of compare_llama_cpp.py: under the Python that has llama-cpp-python, which need not be ours.

Commands, a line each on standard input, one JSON answer each: `load PATH THREADS FORM CLOCK STREAMS` (CLOCK: wall
or cpu; STREAMS: the most at once), `prefill N`, `decode STREAMS PROMPT STEPS`. Standard output holds nothing
else. FORM is one of `repacked` and `not-repacked` (weights on the CPU), `shared-cache` and `own-caches` (all layers on
the GPU, flash attention, one KV cache for all streams or one each).
"""

import ctypes
import json
import sys
import time

import llama_cpp as llama
import numpy as np

TOKENS = 1024  # of a stream, at most
Rows = list[tuple[int, int, bool]]  # (position, sequence, wants logits)


class Model:
    def __init__(self, path: str, threads: int, form: str, clock: str, streams: int) -> None:
        self.clock = time.process_time if clock == "cpu" else time.perf_counter
        on_gpu = form in ("shared-cache", "own-caches")
        params = llama.llama_model_default_params()
        params.n_gpu_layers = 999 if on_gpu else 0
        params.use_extra_bufts = form != "not-repacked"  # llama.cpp's weight repacking, its default
        start = time.perf_counter()
        self.model = llama.llama_model_load_from_file(path.encode(), params)
        self.load_s = time.perf_counter() - start
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}; its log is silenced here, llama-bench shows it")
        context = llama.llama_context_default_params()
        context.n_ctx = streams * TOKENS
        context.n_batch = context.n_ubatch = 512
        context.n_threads = context.n_threads_batch = threads
        context.n_seq_max = streams
        context.kv_unified = form != "own-caches"  # one cache for all streams: a single one may use it all
        if on_gpu:
            context.flash_attn_type = llama.LLAMA_FLASH_ATTN_TYPE_ENABLED
        self.context = llama.llama_init_from_model(self.model, context)
        self.vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.random = np.random.default_rng(0)

    def clear(self) -> None:
        llama.llama_memory_clear(llama.llama_get_memory(self.context), True)

    def batch(self, rows: Rows) -> llama.llama_batch:
        """Random tokens in these rows."""
        batch = llama.llama_batch_init(len(rows), 0, 1)
        batch.n_tokens = len(rows)
        for i, (position, sequence, logits) in enumerate(rows):
            batch.token[i] = int(self.random.integers(0, self.vocab))
            batch.pos[i], batch.n_seq_id[i], batch.logits[i] = position, 1, logits
            batch.seq_id[i][0] = sequence
        return batch

    def decode(self, batches: list[llama.llama_batch]) -> float:
        """Tokens a second of a call for each. The batches are there before, as our plans are."""
        start = self.clock()
        for batch in batches:
            if llama.llama_decode(self.context, batch) != 0:
                raise RuntimeError("llama_decode failed")
            llama.llama_synchronize(self.context)
        seconds = self.clock() - start
        tokens = sum(batch.n_tokens for batch in batches)
        for batch in batches:
            llama.llama_batch_free(batch)
        return float(tokens / seconds)

    def prefill(self, tokens: int) -> float:
        self.clear()
        parts = [range(first, min(first + 512, tokens)) for first in range(0, tokens, 512)]
        return self.decode([self.batch([(p, 0, p == tokens - 1) for p in part]) for part in parts])

    def streams(self, count: int, prompt: int, steps: int) -> float:
        self.clear()
        self.decode(
            [self.batch([(p, sequence, p == prompt - 1) for p in range(prompt)]) for sequence in range(count)]
        )
        positions = range(prompt, prompt + steps)
        return self.decode(
            [self.batch([(at, sequence, True) for sequence in range(count)]) for at in positions]
        )


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
            model = Model(args[0], int(args[1]), args[2], args[3], int(args[4]))
            answer = model.load_s
        elif model is None:
            raise SystemExit("load a model first")
        elif name == "prefill":
            answer = model.prefill(int(args[0]))
        else:
            answer = model.streams(*map(int, args))
        print(json.dumps(answer), flush=True)


main()  # it runs as a child and is imported by nothing
