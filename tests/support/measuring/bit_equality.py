"""Whether two checkouts compute the same, bit for bit: what a change that must not change anything is checked with.

    python -m tests.support.measuring.bit_equality ../base . --fixtures ../shared/fixtures [--models 'tiny-*-q4_0.gguf']

Every model NAME.gguf of the folder whose prompts stand in NAME.golden.json beside it (`{"cases": [{"tokens": [...]}]}`)
is served by each checkout's own `launch.py` on the CPU, once with --debug-dump and once without. Compared are all
tensors of all dumped rows (embedding, each layer's, logits, sampled tokens), rows with the same context; and the
answers without a dump: text, token ids, logprobs of prompt and answer. Each checkout needs its extension built
(moeserve/kernels/_C*.so).

Exit code 0: all equal; 1: something differs, and the first such tensor of each model is named; 2: nothing to compare.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moeserve.cli.compare_dumps.reader import Dump, StepReader
from moeserve.worker.recording.dump_format import (
    CONTEXTS,
    LOGITS,
    POSITIONS,
    PREVIOUS,
    SAMPLED,
    SAMPLED_ROWS,
    SLOTS,
    TOKENS,
)
from tests.support.servers.server import Server, running_server

NEW_TOKENS = 12  # of each answer
LOGPROBS = 5
MAX_DUMPED_STEPS = 10_000
ABOUT_THE_ROW = {CONTEXTS, PREVIOUS, TOKENS, POSITIONS, SLOTS, SAMPLED_ROWS}
EXIT_DIFFERENT, EXIT_USAGE = 1, 2

# Of one tensor: each context's bytes. A context that was computed twice must have come out the same.
Rows = dict[int, bytes]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one checkout computed of one model."""

    tensors: dict[str, Rows]
    answers: list[dict[str, Any]]


def prompts_of(model: Path) -> list[list[int]]:
    golden = json.loads(model.with_suffix(".golden.json").read_text())
    return [case["tokens"] for case in golden["cases"]]


def models_in(folder: Path, patterns: list[str]) -> list[Path]:
    """Those whose prompts are beside them, each once, by name."""
    found = {path for pattern in patterns for path in folder.glob(pattern)}
    return sorted(path for path in found if path.with_suffix(".golden.json").exists())


def run(checkout: Path, model: Path, threads: int) -> Seen:
    """Raises RuntimeError with the server's log where it does not start."""
    prompts = prompts_of(model)
    flags = ("--device", "cpu", "--threads", str(threads))
    with tempfile.TemporaryDirectory() as folder:
        dump = Path(folder) / "dump"
        dumping = ("--debug-dump", str(dump), "--debug-dump-steps", str(MAX_DUMPED_STEPS))
        with running_server(model, *flags, *dumping, checkout=checkout) as server:
            ask_all(server, prompts)
        tensors = tensors_of(Dump(dump))
    with running_server(model, *flags, checkout=checkout) as server:
        return Seen(tensors, ask_all(server, prompts))


def ask_all(server: Server, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Each prompt's greedy answer, one after another."""
    answers = []
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
        more = {"logprobs": LOGPROBS, "echo": True, "return_token_ids": True}
        (choice,) = server.post("/v1/completions", body | more)["choices"]
        answers.append(choice)
    return answers


def tensors_of(dump: Dump) -> dict[str, Rows]:
    """Raises ValueError where one context has two results in the same dump."""
    tensors: dict[str, Rows] = {}
    for step in dump.steps:
        contexts = step.read(CONTEXTS)
        for name, of_rows in _step_tensors(step):
            rows = tensors.setdefault(name, {})
            for context, values in zip(contexts[of_rows].tolist(), step.read(name), strict=True):
                if rows.setdefault(context, values.tobytes()) != values.tobytes():
                    raise ValueError(
                        f"{name} has two results for one context: the engine is not batch invariant"
                    )
    return tensors


def _step_tensors(step: StepReader) -> Iterator[tuple[str, npt.NDArray[np.int64]]]:
    """Each computed tensor of a step, and the rows that it has."""
    everything = np.arange(step.shapes[CONTEXTS][0])
    sampled = step.read(SAMPLED_ROWS).astype(np.int64) if SAMPLED_ROWS in step else everything[:0]
    for name in step.shapes:
        if name not in ABOUT_THE_ROW:
            yield name, sampled if name in (LOGITS, SAMPLED) else everything


def differences(base: Seen, new: Seen) -> list[str]:
    """In words, in the order in which a step makes the tensors; empty: all is equal."""
    lines = []
    for name in [*base.tensors, *(name for name in new.tensors if name not in base.tensors)]:
        before, after = base.tensors.get(name, {}), new.tensors.get(name, {})
        alone = before.keys() ^ after.keys()
        other = [context for context in before.keys() & after.keys() if before[context] != after[context]]
        if alone:
            lines.append(f"{name}: {len(alone)} rows are in one dump only")
        if other:
            lines.append(f"{name}: {len(other)} of {len(before)} rows differ")
    for index, (before_answer, after_answer) in enumerate(zip(base.answers, new.answers, strict=True)):
        if before_answer != after_answer:
            fields = [key for key in before_answer if before_answer[key] != after_answer.get(key)]
            lines.append(f"answer {index}: {', '.join(fields) or 'more fields'} differ")
    return lines


def report(model: Path, base: Seen, new: Seen) -> bool:
    """Prints; says whether all is equal."""
    found = differences(base, new)
    logits = len(base.tensors.get(LOGITS, {}))
    rows = max(len(rows) for rows in base.tensors.values())
    counted = (
        f"{len(base.tensors)} tensors of {rows} rows, {logits} rows of logits, {len(base.answers)} answers"
    )
    print(f"{model.name}: {'equal' if not found else 'DIFFERENT'} ({counted})", flush=True)
    for line in found[:3]:
        print(f"  {line}")
    if len(found) > 3:
        print(f"  and {len(found) - 3} more")
    return not found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.support.measuring.bit_equality",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", type=Path, metavar="BASE_DIR")
    parser.add_argument("new", type=Path, metavar="NEW_DIR")
    parser.add_argument("--fixtures", type=Path, required=True, metavar="DIR")
    parser.add_argument("--models", nargs="+", default=["*.gguf"], metavar="GLOB", help="default: all")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args(arguments)
    models = models_in(args.fixtures, args.models)
    if not models:
        print(f"error: no model with a .golden.json beside it in {args.fixtures}", file=sys.stderr)
        return EXIT_USAGE
    base, new = args.base.resolve(), args.new.resolve()
    equal = [report(m, run(base, m, args.threads), run(new, m, args.threads)) for m in models]
    print(f"{sum(equal)} of {len(models)} models are equal bit for bit")
    return 0 if all(equal) else EXIT_DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
