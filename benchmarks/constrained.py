"""What grammars cost: the worker's decode steps with and without them, taken in turns on one machine.

    python -m benchmarks.constrained --model model.gguf [--batch 8] [--blocks 12]

Three groups of requests live in one worker, in this process: without a grammar, with one that allows any text but no
end, and with an endless JSON array. They take turns of a few steps each, so that whatever else the machine does hits
all of them; a turn's first step, which ends what the turn before has begun, is not counted. The first two groups have
the same prompts and seeds and sample the same tokens, so they read the same experts: their ratio is the cost of masks
and matchers alone. The JSON's own tokens make for other experts; `ns_per_kb`, the time for what was read, evens that
out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from array import array

from moeserve.cli.command_line import resolve
from moeserve.config import ServerConfig
from moeserve.grammar.spec import JsonSchema, Regex
from moeserve.grammar.translate import to_grammar
from moeserve.messages.sampling import SamplingParams
from moeserve.messages.steps import NewSeq, Row, StepPlan
from moeserve.worker.loading.cpu.load import load_cpu_runner
from moeserve.worker.runner import Runner

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "size": {"type": "integer"}, "kind": {"enum": ["a", "b"]}},
    "required": ["name", "size", "kind"],
    "additionalProperties": False,
}
ENDLESS = {"type": "array", "items": ITEM, "minItems": 100_000}
GRAMMARS = {
    "no grammar": "",
    "any text": to_grammar(Regex("(?s:.*) which is the end of it")),
    "JSON": to_grammar(JsonSchema(json.dumps(ENDLESS))),
}
PROMPT = 16  # tokens
TURN = 5  # steps, the first of which is not counted
MAX_TOKENS = 1 << 20


@dataclasses.dataclass
class Group:
    """Requests that decode together, in request slots first .. first + batch - 1."""

    first: int
    batch: int
    position: int = 0
    ms: list[float] = dataclasses.field(default_factory=list)  # a token of each, on average over a turn
    ns_per_kb: list[float] = dataclasses.field(default_factory=list)

    def rows(self, count: int, room: int) -> list[Row]:
        """The next `count` positions of each request; a request's KV slots are its own `room`."""
        rows = []
        for slot in range(self.first, self.first + self.batch):
            begin = slot * room + self.position
            rows.append(
                Row(slot, self.position, count, array("i", range(begin, begin + count)).tobytes(), True)
            )
        self.position += count
        return rows


class Bench:
    def __init__(self, runner: Runner, batch: int, room: int) -> None:
        self._runner = runner
        self._room = room
        self._step = 0
        self.groups = {name: Group(i * batch, batch) for i, name in enumerate(GRAMMARS)}
        for name, group in self.groups.items():
            self._run(group, PROMPT, [self._new(group.first + i, i, GRAMMARS[name]) for i in range(batch)])

    def turn(self, group: Group) -> None:
        self._run(group, 1)
        read = self._runner.engine.weight_counters()
        started = time.perf_counter()
        for _ in range(TURN - 1):
            self._run(group, 1)
        seconds = time.perf_counter() - started
        group.ms.append(seconds * 1e3 / (TURN - 1))
        group.ns_per_kb.append(seconds * 1e9 / (self._runner.engine.weight_bytes_since(read) / 1e3))

    def _run(self, group: Group, count: int, new: list[NewSeq] | None = None) -> None:
        self._step += 1
        result = self._runner.step(StepPlan(self._step, new or [], group.rows(count, self._room)))
        failed = [sampled.error for sampled in result.sampled if sampled.token_id < 0]
        assert not failed, failed

    def _new(self, slot: int, seed: int, grammar: str) -> NewSeq:
        prompt = array("i", [100 + 7 * seed + i for i in range(PROMPT)])
        sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=seed, grammar=grammar)
        return NewSeq(slot, prompt.tobytes(), PROMPT, b"", sampling)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="default: the model that ships with moeserve")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--blocks", type=int, default=12, help="turns of each group")
    arguments = parser.parse_args()
    room = PROMPT + arguments.blocks * TURN + 64
    slots = len(GRAMMARS) * arguments.batch
    config = ServerConfig(
        model=arguments.model,
        max_num_seqs=slots,
        max_total_tokens=max(64, slots * room),
        max_model_len=room,
        max_num_batched_tokens=max(512, arguments.batch * PROMPT),
    )
    bench = Bench(load_cpu_runner(resolve(config), lambda *_: None), arguments.batch, room)
    for _ in range(arguments.blocks):
        for group in bench.groups.values():
            bench.turn(group)
    base = bench.groups["no grammar"]
    for name, group in bench.groups.items():
        figures = {
            "kind": name,
            "step_ms": round(statistics.median(group.ms), 3),
            "tokens_per_second": round(arguments.batch * 1e3 / statistics.median(group.ms), 1),
            "time_of_no_grammar": round(_median_ratio(group.ms, base.ms), 3),
            "ns_per_kb_of_no_grammar": round(_median_ratio(group.ns_per_kb, base.ns_per_kb), 3),
        }
        print(json.dumps(figures))


def _median_ratio(measured: list[float], base: list[float]) -> float:
    """Of neighbouring turns."""
    return statistics.median(one / other for one, other in zip(measured, base, strict=True))


if __name__ == "__main__":
    main()
