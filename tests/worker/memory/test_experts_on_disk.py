"""A CPU worker with experts on disk: tokens as with all in RAM, and what a disk that fails does to a step's rows."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from moeserve.cli.plan.fit import fit_model
from moeserve.config.units import GIB
from moeserve.errors import ConfigError
from moeserve.kv.layout import KvLayout
from moeserve.messages.expert_disk import ExpertDiskCounts
from moeserve.messages.pages import PAGE_KEY_BYTES, PageCopy, PageOrders
from moeserve.messages.steps import NewSeq, StepPlan, StepResult
from moeserve.models.blocks.cpu import disk_experts as cpu_disk_experts
from moeserve.models.errors import ModelError
from moeserve.models.registry import read_shape
from moeserve.models.sources.gguf import open_gguf
from moeserve.placement import step_tokens
from moeserve.placement.expert_cache.replay import Steps
from moeserve.placement.expert_cache.replay_disk import replay_disk
from moeserve.placement.expert_cache.routing_trace import read_trace
from moeserve.placement.expert_ram import expert_bytes
from moeserve.placement.sizes import ModelSizes
from moeserve.worker.group.leader import LeaderGroup
from moeserve.worker.loading.cpu.load import build_cpu_runner, load_cpu_model, load_cpu_runner
from moeserve.worker.loading.gpu.load_plan import plan_load
from moeserve.worker.tiers.storage import PAGE_TOKENS
from tests.conftest import TINY_MODEL
from tests.gpu.driver import GREEDY, Driver, small_config
from tests.kernels.engines.model_engine import own_fixture
from tests.support.faults.locked_memory_limit import locked_bytes, locked_memory_limit

STREAMS = 8
PROMPTS = [own_fixture().tokens[0][3 * slot : 3 * slot + 12] for slot in range(STREAMS)]
FAULTY_READS = Path(__file__).parents[2] / "support" / "faults" / "faulty_reads.c"


def ram_for(experts: int) -> float:
    """GiB for as many of each layer's experts."""
    file = open_gguf(TINY_MODEL)
    shape = read_shape(file)
    everything = expert_bytes(ModelSizes.of(file.tensors, KvLayout(shape)))
    return (experts + 0.5) / shape.num_experts * everything / GIB


def driver_of(model: Path, **options: object) -> Driver:
    return Driver(load_cpu_runner(small_config(model, threads=2, **options), lambda *_: None))


def prompts_of(driver: Driver) -> StepResult:
    new = [driver.new(slot, tokens, GREEDY) for slot, tokens in enumerate(PROMPTS)]
    return driver.step(
        new, [driver.row(slot, len(tokens), sample=True) for slot, tokens in enumerate(PROMPTS)]
    )


def tokens_of(driver: Driver) -> StepResult:
    return driver.step([], [driver.row(slot, 1, sample=True) for slot in range(STREAMS)])


def tokens(result: StepResult) -> list[int]:
    return [entry.token_id for entry in result.sampled]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copy(TINY_MODEL, tmp_path / "model.gguf"))


def restore(model: Path, whole: bytes, changed_ns: int) -> None:
    """The file as it was, with the time of its last change."""
    model.write_bytes(whole)
    os.utime(model, ns=(changed_ns, changed_ns))


def rules_of(folder: Path, *entries: str) -> dict[str, object]:
    """The flag of a rules file with these entries."""
    path = folder / "rules.yaml"
    path.write_text("".join(f"- {{{entry}}}\n" for entry in entries))
    return {"placement_rules": str(path)}


PINS = "match: 'experts[.](1|6)$', device: cpu"  # of all layers


@pytest.mark.parametrize("pins", [(), (PINS,)], ids=["none", "pinned"])
def test_several_streams_are_as_in_ram_and_are_counted(tmp_path: Path, pins: tuple[str, ...]) -> None:
    rules = rules_of(tmp_path, *pins) if pins else {}
    plain, disk = driver_of(TINY_MODEL), driver_of(TINY_MODEL, expert_ram=ram_for(5 + 2 * len(pins)), **rules)
    expected, found = prompts_of(plain), prompts_of(disk)
    assert expected.expert_disk is None
    assert tokens(found) == tokens(expected)
    totals = ExpertDiskCounts()
    for step in range(40):
        # All streams, which need more experts than there are slots, then one.
        slots = range(STREAMS) if step < 20 else range(1)
        expected, found = (
            driver.step([], [driver.row(slot, 1, sample=True) for slot in slots]) for driver in (plain, disk)
        )
        assert tokens(found) == tokens(expected)
        assert not found.failed_rows
        assert found.expert_disk is not None
        totals = totals.plus(found.expert_disk)
    assert totals.misses > 0
    assert totals.hits > 0
    assert totals.bytes > 0
    assert totals.busy_ms > 0
    assert totals.predicted >= totals.predicted_right > totals.predicted / 4


@pytest.mark.parametrize("pinned", [(), (1, 6)], ids=["none", "pinned"])
def test_a_replay_counts_what_the_engine_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pinned: tuple[int, ...]
) -> None:
    """`plan` replays a trace through the same slots. Guesses are off: the replay makes none. Pinned experts are hits
    from the first step on."""
    monkeypatch.setattr(cpu_disk_experts, "MOST_GUESSED_TOKENS", 0)
    count, slots = 60, 7
    trace = tmp_path / "trace"
    flags = {"record_routing_trace": str(trace), "record_routing_tokens": count}
    flags |= rules_of(tmp_path, PINS) if pinned else {}
    disk = driver_of(TINY_MODEL, expert_ram=ram_for(slots), **flags)
    results = [disk.step([disk.new(0, PROMPTS[0][:1], GREEDY)], [disk.row(0, 1, sample=True)])]
    results += [disk.step([], [disk.row(0, 1, sample=True)]) for _ in range(count - 1)]
    recorded = read_trace(trace)
    layers, experts, _ = recorded.shape
    stays = np.zeros((layers, experts), np.bool_)
    stays[:, list(pinned)] = True
    uses = replay_disk(Steps(recorded, 1), [slots] * layers, experts, pinned=stays)
    for result, use in zip(results, uses, strict=True):
        assert result.expert_disk is not None
        missed, used = int(use.missed.sum()), int(use.used.sum())
        assert (result.expert_disk.hits, result.expert_disk.misses) == (used - missed, missed)
    assert sum(int(use.missed.sum()) for use in uses[20:]) > 0


def test_who_is_on_disk_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What RAM lacks is as many experts as there are no slots for, and the next step's misses are among them. Guesses
    are off: one that is read between two looks takes a slot of its own."""
    monkeypatch.setattr(cpu_disk_experts, "MOST_GUESSED_TOKENS", 0)
    slots = 5
    disk = driver_of(TINY_MODEL, expert_ram=ram_for(slots))
    prompts_of(disk)
    result = disk.step([], [disk.row(0, 1, sample=True)])
    use = disk.runner.expert_use()
    absent = np.frombuffer(use.on_disk, np.uint8).reshape(use.layers, use.experts)
    assert absent.sum(axis=1).tolist() == [use.experts - slots] * use.layers
    assert result.expert_disk is not None
    assert use.disk is not None
    assert use.disk.misses >= result.expert_disk.misses
    before = np.frombuffer(use.tokens, np.int64)
    result = disk.step([], [disk.row(0, 1, sample=True)])
    used = (np.frombuffer(disk.runner.expert_use().tokens, np.int64) > before).reshape(absent.shape)
    assert result.expert_disk is not None
    assert result.expert_disk.misses == int((used & (absent == 1)).sum())
    assert result.expert_disk.hits == int((used & (absent == 0)).sum())
    assert driver_of(TINY_MODEL).runner.expert_use().disk is None


def test_a_layer_whose_experts_all_stay_is_loaded(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, r"match: '^blk[.]0[.]experts', device: cpu")
    disk = driver_of(TINY_MODEL, expert_ram=ram_for(7), **rules)
    prompts_of(disk)
    found = tokens_of(disk)
    assert found.expert_disk is not None
    assert found.expert_disk.misses > 0
    with pytest.raises(ConfigError, match=r"--placement-rules keeps .* GiB of experts in RAM"):
        driver_of(TINY_MODEL, expert_ram=ram_for(5), **rules_of(tmp_path, "match: experts, device: cpu"))


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ("match: 'experts.3$', device: cuda", "is impossible: the CPU engine computes everything"),
        ("match: 'experts.3$', prefill: cuda", "is impossible: the CPU engine computes everything"),
        ("match: token_embd, device: cpu", "matches nothing"),
        ("match: 'experts.999$', device: cpu", "matches nothing"),
    ],
)
def test_rules_that_keep_no_expert_in_ram(tmp_path: Path, entry: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        driver_of(TINY_MODEL, expert_ram=ram_for(7), **rules_of(tmp_path, entry))


def test_rules_need_experts_on_disk(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--placement-rules: there is nothing to place"):
        driver_of(TINY_MODEL, **rules_of(tmp_path, PINS))


def test_a_pinned_expert_that_cannot_be_read_ends_the_start(model: Path, tmp_path: Path) -> None:
    config = small_config(model, threads=2, expert_ram=ram_for(7), **rules_of(tmp_path, PINS))
    loaded = load_cpu_model(config, lambda *_: None)
    os.truncate(model, 4096)
    with pytest.raises(ModelError, match="its experts cannot be read"):
        build_cpu_runner(loaded)


def test_a_truncated_file_ends_the_rows_that_needed_it(model: Path) -> None:
    plain, disk = driver_of(TINY_MODEL), driver_of(model, expert_ram=ram_for(7))
    whole, changed_ns = model.read_bytes(), model.stat().st_mtime_ns
    prompts_of(plain)
    assert not prompts_of(disk).failed_rows
    os.truncate(model, 4096)
    failed: set[int] = set()
    while not failed:
        expected, found = tokens_of(plain), tokens_of(disk)
        failed |= found.failed_rows.keys()
        for slot in set(range(STREAMS)) - failed:
            assert found.sampled[slot].token_id == expected.sampled[slot].token_id
    assert len(failed) < STREAMS
    assert all(
        "could not be read from disk: the file ends at byte" in why for why in found.failed_rows.values()
    )
    assert found.expert_disk is not None
    assert found.expert_disk.errors > 0

    # Who continues from what such a row wrote fails, too, and the others go on.
    (ended, *_), (alive, *_) = sorted(failed), sorted(set(range(STREAMS)) - failed)
    restore(model, whole, changed_ns)
    slots = {slot: list(disk.slots(slot)) for slot in (ended, alive)}
    both = [*PROMPTS[0], 5]
    prefixes = [np.array(slots[slot][: len(both) - 1], np.int32) for slot in (ended, alive)]
    prefixes[0][-1] = slots[ended][-1]
    new = [
        NewSeq(STREAMS + i, np.array(both, np.int32).tobytes(), len(both), prefix.tobytes(), GREEDY)
        for i, prefix in enumerate(prefixes)
    ]
    for i, prefix in enumerate(prefixes):
        disk.adopt(STREAMS + i, prefix.tolist())
    found = disk.step(new, [disk.row(STREAMS + i, 1, sample=True) for i in range(2)])
    assert list(found.failed_rows) == [0]
    assert "a prefix that it shares" in found.failed_rows[0]

    # All of it again, on a disk that is whole.
    for driver in (plain, disk):
        for slot in range(STREAMS + 2):
            driver.free(slot)
    assert tokens(prompts_of(disk)) == tokens(prompts_of(plain))


@pytest.mark.parametrize("allowed", [True, False], ids=["allowed", "refused"])
def test_a_worker_starts_whether_slots_may_be_locked_or_not(allowed: bool) -> None:
    gc.collect()
    before = locked_bytes()
    with locked_memory_limit(before + (8 << 20 if allowed else 0)):
        driver = driver_of(TINY_MODEL, expert_ram=ram_for(5))
    least = int(ram_for(5) * GIB * 5 / 5.5)
    assert locked_bytes() - before >= least if allowed else locked_bytes() == before
    result = driver.step([driver.new(0, [1, 2, 3], GREEDY)], [driver.row(0, 3, sample=True)])
    assert not result.failed_rows


def test_a_file_that_is_written_while_served_is_not_read(model: Path) -> None:
    """Other weights of the same size: rows that need them fail with the cause, and the others have their tokens."""
    plain, disk = driver_of(TINY_MODEL), driver_of(model, expert_ram=ram_for(7))
    assert tokens(prompts_of(disk)) == tokens(prompts_of(plain))
    whole = np.fromfile(model, np.uint8)
    with model.open("r+b") as file:
        file.write(np.roll(whole, 1 << 16).tobytes())
    failed: set[int] = set()
    while not failed:
        expected, found = tokens_of(plain), tokens_of(disk)
        failed |= found.failed_rows.keys()
        for slot in set(range(STREAMS)) - failed:
            assert found.sampled[slot].token_id == expected.sampled[slot].token_id
    told = "could not be read from disk: the file was changed while it was served; restart the server"
    assert all(told in why for why in found.failed_rows.values())


@pytest.fixture(scope="module")
def on_faulty_disk(tmp_path_factory: pytest.TempPathFactory) -> dict[str, int]:
    library = tmp_path_factory.mktemp("library") / "faulty_reads.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, FAULTY_READS, "-ldl"], check=True)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.support.faults.on_faulty_disk",
            str(TINY_MODEL),
            str(ram_for(5)),
            "1000",
        ],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_thousand_faults_bring_no_wrong_token(on_faulty_disk: dict[str, int]) -> None:
    kinds = ("eio", "cut", "delayed", "failed", "right")
    assert min(on_faulty_disk[kind] for kind in kinds) > 0, on_faulty_disk


def test_a_slow_disk_reads_no_guesses_and_a_fast_one_does(on_faulty_disk: dict[str, int]) -> None:
    # A thread that loses its core for long makes a guess look cheap now and then.
    assert on_faulty_disk["slow_guessed"] <= 1.3 * on_faulty_disk["slow_plain"]
    assert on_faulty_disk["fast_guessed"] > on_faulty_disk["fast_plain"]


def test_a_file_that_was_replaced_is_not_read(model: Path) -> None:
    loaded = load_cpu_model(small_config(model, threads=2, expert_ram=ram_for(5)), lambda *_: None)
    build_cpu_runner(loaded)
    other = model.with_name("other.gguf")
    shutil.copy(TINY_MODEL, other)
    other.replace(model)
    with pytest.raises(ModelError, match="was replaced or changed since it was loaded"):
        build_cpu_runner(loaded)


def test_too_little_ram_for_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="the experts of one token take"):
        driver_of(TINY_MODEL, expert_ram=ram_for(1))


def test_several_gpus_are_refused_before_anything_is_loaded() -> None:
    config = small_config(TINY_MODEL, threads=2, expert_ram=ram_for(5))
    group = LeaderGroup(config, [], 1)  # that of one rank has no processes
    told = "--expert-ram: with several GPUs no expert can be on disk; leave it out"
    with pytest.raises(ConfigError, match=told):
        plan_load(config, open_gguf(TINY_MODEL), torch.device("cpu"), group)


def test_ram_for_all_leaves_nothing_on_disk() -> None:
    assert prompts_of(driver_of(TINY_MODEL, expert_ram=1.0)).expert_disk is None


def test_steps_are_longer_where_prompts_read_experts_from_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as `plan` says: each step with a prompt reads nearly all experts that are not in RAM."""
    monkeypatch.setattr(step_tokens, "SHARE_OF_EXPERT_RAM", 1e9)  # the fixture's experts are tiny
    config = small_config(TINY_MODEL, threads=2, max_num_batched_tokens=None)
    for ram, tokens in ((ram_for(5), step_tokens.MOST_FROM_DISK), (1.0, step_tokens.ON_CPU)):
        with_ram = dataclasses.replace(config, expert_ram=ram)
        assert load_cpu_model(with_ram, lambda *_: None).step_tokens == tokens
        assert fit_model(with_ram, gpu=None, ram=8 * GIB).step_tokens == tokens


def test_wrong_kv_is_not_written_to_the_disk_tier(model: Path, tmp_path: Path) -> None:
    """A page of a row that lacked an expert is skipped; a page of another row is stored, and so is the first one when
    its slots are computed again."""
    disk = driver_of(model, expert_ram=ram_for(7), kv_disk=str(tmp_path / "kv"))
    whole, changed_ns = model.read_bytes(), model.stat().st_mtime_ns
    prompt = (PROMPTS[0] * 3)[:PAGE_TOKENS]

    def compute(slot: int) -> StepResult:
        new = disk.new(slot, prompt, GREEDY)
        return disk.step([new], [disk.row(slot, len(prompt), sample=True)])

    def write(*pages: tuple[bytes, int]) -> tuple[bytes, bytes]:
        """Orders the pages of request slots. Returns the keys stored and skipped."""
        copies = [PageCopy(key, np.array(disk.slots(slot), np.int32).tobytes()) for key, slot in pages]
        plan = StepPlan(0, [], [], pages=PageOrders(writes=copies))
        stored, skipped = b"", b""
        while len(stored) + len(skipped) < len(pages) * PAGE_KEY_BYTES:
            if (report := disk.runner.step(plan).pages) is not None:
                stored, skipped = stored + report.disk.stored, skipped + report.disk.skipped
            plan = StepPlan(0, [], [])
        return stored, skipped

    wrong, right = (bytes([i]) * PAGE_KEY_BYTES for i in (1, 2))
    os.truncate(model, 4096)
    assert compute(0).failed_rows
    restore(model, whole, changed_ns)
    assert not compute(1).failed_rows
    assert write((wrong, 0), (right, 1)) == (right, wrong)
    assert not compute(0).failed_rows
    assert write((wrong, 0)) == (wrong, b"")
