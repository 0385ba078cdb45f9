"""Fuzzes what reads a model: `python -m tests.fuzz.models --cases 50000`.

A case is a hostile file or folder made from a seed. It is opened, its metadata, tensors, tokenizer and RoPE tables are
read, and what is left standing is loaded and computed with. Allowed is a UserError with a short text, or an answer;
a finding is any other exception (a MemoryError under a limit on the address space included), a signal, or a case that
takes more than MAX_SECONDS. Cases run in a process of their own, which tells the seed it is at.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import random
import resource
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from moeserve.config import ServerConfig
from moeserve.errors import UserError
from tests.fuzz.folder_mutations import write_hostile_folder
from tests.fuzz.gguf_mutations import write_hostile_gguf
from tests.fuzz.quantised_mutations import write_hostile_quants

MAX_SECONDS = 5.0  # of CPU time
PROGRESS_EVERY = 1000  # cases
MAX_MESSAGE_CHARS = 4000
ROOM_BYTES = 1 << 30  # of address space, beyond what the process takes without a model
TEXT = "ab abc 1 <|im_end|> \u00e9 \u4e2d\U0001f600<think>\x00  \n"


@dataclass(frozen=True)
class Finding:
    seed: int
    problem: str


def write_case(folder: Path, seed: int) -> Path:
    rng = random.Random(seed)
    (write,) = rng.choices((write_hostile_gguf, write_hostile_quants, write_hostile_folder), (60, 10, 30))
    return write(folder, rng)


def use_model(path: Path) -> None:
    """Everything that the processes of a server do with a model's files, and a step of its engine."""
    from moeserve.models.open import open_metadata, open_model
    from moeserve.models.registry import read_shape
    from moeserve.models.tensors import check_tensors
    from moeserve.tokenizer import TextTokenizer

    source = open_metadata(path)
    tokenizer = TextTokenizer.from_gguf(source)
    ids = tokenizer.encode(TEXT)
    tokenizer.decode(ids, skip_special=False)
    source = open_model(path)
    config = read_shape(source)
    check_tensors(config, source)
    for name in source.tensors:
        source.data(name)[-1]
    _run(path)


def _run(path: Path) -> None:
    from array import array

    from moeserve.messages.sampling import SamplingParams
    from moeserve.messages.steps import NewSeq, Row, StepPlan
    from moeserve.worker.loading.cpu.load import load_cpu_runner

    config = ServerConfig(
        model=str(path), max_total_tokens=64, max_num_seqs=1, max_num_batched_tokens=16, threads=1
    )
    runner = load_cpu_runner(config, lambda *_: None)
    length = min(3, runner.ready().max_model_len)
    slots, ids = array("i", range(length)).tobytes(), array("i", range(length)).tobytes()
    seq = NewSeq(0, ids, length, b"", SamplingParams(max_tokens=1, logprobs=2))
    row = Row(0, 0, length, slots, True, slots if runner.ready().num_window_slots else b"")
    runner.step(StepPlan(0, [seq], [row]))


def run_case(seed: int) -> str | None:
    """What went wrong, or None."""
    started = time.process_time()  # the machine may be busy
    with tempfile.TemporaryDirectory() as folder:
        path = write_case(Path(folder), seed)
        try:
            use_model(path)
        except UserError as error:
            if len(str(error)) > MAX_MESSAGE_CHARS:
                return f"a message of {len(str(error))} characters: {str(error)[:200]}"
        except Exception:  # noqa: BLE001  a finding, whatever it is
            return traceback.format_exc()
    seconds = time.process_time() - started
    return f"took {seconds:.1f} s" if seconds > MAX_SECONDS else None


def _child(seeds: range, to_parent: Connection) -> None:
    _warm_up()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + ROOM_BYTES, in_use + ROOM_BYTES))
    for seed in seeds:
        to_parent.send((seed, None))
        if (problem := run_case(seed)) is not None:
            to_parent.send((seed, problem))
    to_parent.send((None, None))


def _warm_up() -> None:
    """Loads torch and all else that counts as address space but is no model's doing."""
    import moeserve.worker.loading.load  # noqa: F401


def fuzz(seeds: range) -> list[Finding]:
    findings: list[Finding] = []
    context = mp.get_context("fork")
    while seeds:
        parent, child = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(seeds, child), daemon=True)
        process.start()
        child.close()
        at, findings_here, is_done = _watch(parent)
        findings += findings_here
        process.kill()
        process.join()
        if is_done:
            break
        findings.append(Finding(at, f"the process ended with {process.exitcode}, or hung"))
        seeds = range(at + 1, seeds.stop)
    return findings


def _watch(parent: Connection) -> tuple[int, list[Finding], bool]:
    """The last seed that was begun, what was found, and whether all are done."""
    at = 0
    findings: list[Finding] = []
    while True:
        if not parent.poll(60):
            return at, findings, False
        try:
            seed, problem = parent.recv()
        except EOFError:
            return at, findings, False
        if seed is None:
            return at, findings, True
        at = seed
        if problem is None and seed % PROGRESS_EVERY == 0:
            print(f"at {seed}", flush=True)
        if problem is not None:
            findings.append(Finding(seed, problem))
            print(f"seed {seed}: {problem}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=50_000)
    parser.add_argument("--first", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    findings = fuzz(range(arguments.first, arguments.first + arguments.cases))
    seconds = time.monotonic() - started
    print(f"{arguments.cases} cases in {seconds:.0f} s: {len(findings)} findings")
    raise SystemExit(bool(findings))


if __name__ == "__main__":
    main()
