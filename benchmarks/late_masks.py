"""How long steps wait for masks of a crowd.

    python -m benchmarks.late_masks

The worker's own part without a model: 63 answers of one key in step with one another, of whose masks one in six takes
long, beside one answer without a grammar. A step is 35 ms of sleep. Printed are the longest waits, and how many tokens
the crowd got; a late row is bound again at once, as if the router had.
"""

from __future__ import annotations

import os
import time

import numpy as np

from benchmarks.grammar_neighbours import MODEL, NOW_AND_THEN
from moeserve.grammar.engine import GrammarEngine
from moeserve.grammar.spec import Ebnf
from moeserve.grammar.translate import to_grammar
from moeserve.messages.sampling import SamplingParams
from moeserve.models.sources.gguf import open_gguf
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.worker.constraints.slot_guides import Constraints

ROWS, STEPS, STEP_S = 64, 48, 0.035
COMPILATION_S = 1.5


def main() -> None:
    tokenizer = TextTokenizer.from_gguf(open_gguf(MODEL))
    text = tokenizer.encode("123456" * STEPS)[:STEPS]
    costly = SamplingParams(max_tokens=STEPS, grammar=to_grammar(Ebnf(NOW_AND_THEN)))
    constraints = Constraints(ROWS, lambda: GrammarEngine(tokenizer))
    rows = np.arange(ROWS, dtype=np.int32)
    known = [0] * ROWS  # tokens of each answer
    for slot in range(1, ROWS):
        constraints.bind(slot, costly, np.zeros(0, np.int32), "crowd")
    time.sleep(COMPILATION_S)
    waits = []
    for _ in range(STEPS):
        started = time.monotonic()
        constraints.masks_for(rows, STEP_S)
        waits.append(time.monotonic() - started)
        verdicts = constraints.verdicts(rows)
        constraints.accept(rows, np.array([text[count] for count in known], np.int32), verdicts)
        for slot in range(1, ROWS):
            if slot in verdicts.late:
                constraints.bind(slot, costly, np.array(text[: known[slot]], np.int32), "crowd")
            else:
                known[slot] += 1
        time.sleep(STEP_S)
    longest = ", ".join(f"{wait:.3f}" for wait in sorted(waits)[-3:])
    print(
        f"longest waits {longest} s, all {sum(waits):.2f} s, {sum(known)} tokens, load {os.getloadavg()[0]:.1f}"
    )
    constraints.close()


if __name__ == "__main__":
    main()
