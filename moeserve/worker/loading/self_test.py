"""Tests a model before it serves: one small step, whose logits must be finite.

A NaN in the weights (a broken conversion, a damaged float file) is thus found with the file's name, before the first
request. Experts to which the few tokens are not routed stay untested: a request that reaches a NaN later ends with
an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np

from moeserve.kv.driven_slots import SlotCounter
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.models.errors import ModelError
from moeserve.worker.runner import Runner

ZEROED: Final = np.array([-1, 0], np.int32).tobytes()  # zeroes state slot 0
TOKENS: Final = 8  # few enough for a GPU's CUDA graph


def check_logits(runner: Runner, path: Path) -> None:
    """Raises ModelError if the logits of TOKENS tokens from all over the vocabulary are not finite."""
    ready = runner.ready()
    n = min(TOKENS, ready.max_model_len, ready.num_kv_slots, ready.max_num_batched_tokens)
    tokens = np.linspace(0, ready.vocab_size - 1, n).astype(np.int32)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    has_state = ready.num_state_slots > 0
    seq = NewSeq(0, tokens.tobytes(), n, b"", sampling, state_slot=0 if has_state else -1)
    slots = SlotCounter(ready.kv_slot_kinds).take(0, n)
    row = Row(0, 0, n, slots, True, slots if ready.num_window_slots else b"")
    result = runner.rehearse(StepPlan(0, [seq], [row], ZEROED if has_state else b""))
    if result.failed_rows:
        raise ModelError(path, result.failed_rows[0])
    of_prompt = result.prompt_logprobs.get(0, [])
    if result.sampled[0].token_id < 0 or any(entry.rank == 0 for entry in of_prompt):
        raise ModelError(
            path,
            "this model's logits are not finite: its weights hold a NaN or an infinity; convert or download it again",
        )
