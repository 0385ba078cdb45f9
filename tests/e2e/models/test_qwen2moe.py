"""A Qwen2-MoE through the whole server: biases, a gated shared expert, weights that do not sum to 1."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt
import pytest

from moeserve.cli.compare_dumps.reader import Dump
from moeserve.config.units import GIB
from moeserve.models.open import open_model
from moeserve.models.registry import read_checked_shape
from moeserve.models.sources.source import ModelSource
from moeserve.quantization.reference import dequantize
from tests.conftest import OWN_FIXTURES, fixtures_dir
from tests.e2e.completions import at_once, completion
from tests.support.measuring.accuracy import Case, served_greedy
from tests.support.measuring.accuracy import Fixture as Golden
from tests.support.servers.server import REPOSITORY, Server, clean_environment, running_server

MODEL = OWN_FIXTURES / "tiny-qwen2moe-q4_k_m.gguf"
LAYERS, EXPERTS, TOP_K = 3, 8, 3
DUMPED_STEPS = 4
Floats = npt.NDArray[np.floating[Any]]
CLEAR_MARGIN = 0.1  # of llama.cpp's logits; the greedy text is a yardstick before the first step below it
cpu_engine = pytest.mark.cpu_engine("a GPU's kernels depend on how many rows a step has")


@pytest.fixture(scope="module")
def dump_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen2moe") / "dump"


@pytest.fixture(scope="module")
def qwen2(dump_folder: Path) -> Iterator[Server]:
    """Its first steps are dumped: those of `first_answer`."""
    flags = ("--debug-dump", str(dump_folder), "--debug-dump-steps", str(DUMPED_STEPS))
    with running_server(MODEL, "--max-model-len", "256", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    golden = json.loads((OWN_FIXTURES / f"{MODEL.stem}.golden.json").read_text())
    return [case["tokens"] for case in golden["cases"]]


@pytest.fixture(scope="module")
def first_answer(qwen2: Server, prompts: list[list[int]]) -> dict[str, Any]:
    """The server's first request. What comes before any other test's."""
    return completion(qwen2, prompt=prompts[0], max_tokens=6)


def requests_of(prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Requests of several lengths, greedy and sampled, none of which finds another's prefix in the cache."""
    return [
        {
            "prompt": tokens[: 5 + 6 * i],
            "max_tokens": 16,
            "temperature": 0.9 * (i % 2),
            "seed": i,
            "echo": True,
            "logprobs": 20,
            "return_tokens_as_token_ids": True,
            "cache_salt": f"{i}",
        }
        for i, tokens in enumerate([*prompts, *prompts])
    ]


# ---------------------------------------------------------------- what is answered


@pytest.mark.slow
@cpu_engine
def test_alone_and_in_a_crowd(qwen2: Server, first_answer: dict[str, Any], prompts: list[list[int]]) -> None:
    requests = requests_of(prompts)
    alone = [completion(qwen2, **request) for request in requests]
    assert len({json.dumps(answer["logprobs"]["tokens"]) for answer in alone}) == len(requests)
    # As others, so that each is computed again from its first token on.
    salted = [request | {"cache_salt": f"crowd {i}"} for i, request in enumerate(requests)]
    assert at_once(lambda request: completion(qwen2, **request), salted) == alone


@pytest.mark.slow
@cpu_engine
def test_logprobs_are_the_engines_own(
    qwen2: Server, first_answer: dict[str, Any], prompts: list[list[int]]
) -> None:
    """To the bit: what the engine computes in this process, of the same tokens."""
    from moeserve.worker.loading.cpu.load import load_cpu_runner  # torch
    from tests.gpu.driver import Driver, small_config

    request = requests_of(prompts)[2]
    served = completion(qwen2, **request)["logprobs"]
    tokens = [int(token.removeprefix("token_id:")) for token in served["tokens"]]
    driver = Driver(load_cpu_runner(small_config(MODEL, threads=1), lambda *_: None))
    engine = driver.score(0, tokens, len(tokens))
    assert served["token_logprobs"][1:] == [found.logprob for found in engine[:-1]]
    for shown, found in zip(served["top_logprobs"][1:], engine[:-1], strict=True):
        top = dict(zip(found.top_ids, found.top_logprobs, strict=True)) | {found.token_id: found.logprob}
        assert shown == {f"token_id:{i}": logprob for i, logprob in top.items()}


def agreed_length(case: Case) -> int:
    return next((i for i, margin in enumerate(case.margins) if margin < CLEAR_MARGIN), len(case.greedy))


@pytest.mark.slow
@pytest.mark.skipif(fixtures_dir() is None, reason="the wider fixtures are not here (MOESERVE_FIXTURES)")
def test_greedy_text_is_llama_cpps() -> None:
    """With F16 weights: with quantised ones llama.cpp's own rounding decides."""
    folder = fixtures_dir()
    assert folder is not None
    golden = Golden.load(folder / "families/tiny-qwen2moe-f16.golden.json")
    assert sum(agreed_length(case) for case in golden.cases) > 50
    with running_server(folder / "families/tiny-qwen2moe-f16.gguf") as server:
        for case in golden.cases:
            length = agreed_length(case)
            served = served_greedy(server.base_url, case.tokens, len(case.greedy))
            assert served[:length] == case.greedy[:length]


# ---------------------------------------------------------------- what is shown


def test_tokens_are_counted_by_expert(
    qwen2: Server, first_answer: dict[str, Any], prompts: list[list[int]]
) -> None:
    """Only routed experts are counted; the shared one has no count."""
    time.sleep(0.6)  # an answer may be half a second old
    before = httpx.get(qwen2.base_url + "/v1/experts").json()
    assert (before["layers"], before["experts"], before["experts_per_token"]) == (LAYERS, EXPERTS, TOP_K)
    assert np.shape(before["counts"]) == (LAYERS, EXPERTS)
    usage = qwen2.post("/v1/completions", {
        "prompt": prompts[3], "max_tokens": 9, "ignore_eos": True, "cache_salt": "experts",
    })["usage"]  # fmt: skip
    time.sleep(0.6)
    after = httpx.get(qwen2.base_url + "/v1/experts").json()
    computed = usage["prompt_tokens"] + usage["completion_tokens"] - 1
    for old, new in zip(before["counts"], after["counts"], strict=True):
        routed = sum(new) - sum(old)
        assert routed % TOP_K == 0
        assert routed // TOP_K in (computed, computed + 1)  # the last token, once, in a wasted row


def test_a_dump_has_the_shared_experts_part(
    qwen2: Server, first_answer: dict[str, Any], prompts: list[list[int]], dump_folder: Path
) -> None:
    """expert_output, recomputed from the file's weights: the routed experts' sum alone is far away."""
    dump = Dump(dump_folder)
    assert len(dump.steps) == DUMPED_STEPS
    assert dump.num_layers == LAYERS
    assert dump.rows.token[: len(prompts[0])].tolist() == prompts[0]
    rows = np.arange(len(prompts[0]))
    source = open_model(MODEL)
    for layer in range(LAYERS):
        names = ("expert_input", "expert_ids", "expert_weights", "expert_output")
        y, ids, weights, output = (dump.rows_of(f"layers.{layer}.{name}", rows) for name in names)
        assert (weights.sum(axis=1) < 0.999).all()  # not made to sum to 1
        routed = routed_sum(source, layer, y, ids, weights)
        whole = routed + shared_part(source, layer, y)
        assert error_of(output, whole) < 0.05  # of int8 activations
        assert error_of(output, routed) > 0.2


def error_of(found: Floats, expected: Floats) -> float:
    """The median over rows of their distance, relative to the expected one's length."""
    return float(np.median(np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)))


def values_of(source: ModelSource, layer: int, part: str) -> Floats:
    name = f"blk.{layer}.{part}.weight"
    tensor = source.tensors[name]
    values: Floats = dequantize(tensor.type, source.data(name)).reshape(tensor.shape).astype(np.float64)
    return values


def gated(y: Floats, gate: Floats, up: Floats, down: Floats) -> Floats:
    g = gate @ y
    out: Floats = down @ (g / (1 + np.exp(-g)) * (up @ y))
    return out


def routed_sum(source: ModelSource, layer: int, y: Floats, ids: Floats, weights: Floats) -> Floats:
    parts = [values_of(source, layer, f"ffn_{part}_exps") for part in ("gate", "up", "down")]
    rows = [
        sum(
            weight * gated(row, *(part[int(e)] for part in parts))
            for e, weight in zip(chosen, of, strict=True)
        )
        for row, chosen, of in zip(y, ids, weights, strict=True)
    ]
    return np.array(rows)


def shared_part(source: ModelSource, layer: int, y: Floats) -> Floats:
    parts = [values_of(source, layer, f"ffn_{part}_shexp") for part in ("gate", "up", "down")]
    gate = values_of(source, layer, "ffn_gate_inp_shexp")
    return np.array([gated(row, *parts) / (1 + np.exp(-gate @ row)) for row in y])


# ---------------------------------------------------------------- command lines


def moeserve(*arguments: str) -> list[str]:
    """The lines that a command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "moeserve", *arguments],
        cwd=REPOSITORY, env=clean_environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_plan_has_all_its_weights() -> None:
    source = open_model(MODEL)
    stored = {name: tensor.nbytes for name, tensor in source.tensors.items()}
    plan = json.loads("\n".join(moeserve("plan", "--model", str(MODEL), "--device", "cpu", "--json")))
    memory = plan["memory"]
    assert memory["ram_weights"] == plan["file_bytes"] == sum(stored.values())
    assert set(plan["tensors"]) == set(stored)
    assert set(plan["tensors"].values()) == {"cpu"}
    assert memory["ram_weights"] < memory["ram_start"] < memory["ram_weights"] + GIB
    shape = read_checked_shape(source)
    per_token = LAYERS * 2 * 2 * shape.kv_width  # k and v, 16 bits
    assert memory["ram_kv"] == memory["kv_tokens"] * per_token
    assert plan["model"]["layers"][0]["ffn"]["shared"].items() >= {"width": 256, "is_gated": True}.items()
    assert all(rate > 0 for rate in plan["speed"]["decode"].values())


@pytest.mark.slow
def test_a_gpus_plan_has_the_shared_expert_where_attention_is() -> None:
    """Every token passes it: it never stays behind with the routed experts."""
    flags = ("--gpu-memory", "4", "--num-gpu-experts", "0", "--cpu-bandwidth", "10", "--cpu-gops", "100")
    plan = json.loads("\n".join(moeserve("plan", "--model", str(MODEL), *flags, "--json")))
    of_layer = {name.split(".")[2]: where for name, where in plan["tensors"].items() if "blk.1." in name}
    assert {where for part, where in of_layer.items() if part.endswith("_exps")} == {"cpu"}
    assert {where for part, where in of_layer.items() if not part.endswith("_exps")} == {"cuda"}
    assert sum("shexp" in part for part in of_layer) == 4


@pytest.mark.slow
def test_its_engine_is_measured() -> None:
    # In place: panels have rows without content, which are read too.
    threads = ("--device", "cpu", "--weight-layout", "file", "--threads", "2")
    steps = ("--prompt", "24", "--gen", "4", "--batch", "1,2", "--json")
    lines = moeserve("bench", "engine", "--model", str(MODEL), *threads, *steps)
    figures = [json.loads(line) for line in lines]
    assert [(f["phase"], f["batch"]) for f in figures] == [
        ("prefill", 1), ("decode", 1), ("prefill", 2), ("decode", 2),
    ]  # fmt: skip
    assert all(f["tok_s"] > 10 for f in figures)
    # A token alone reads everything but the embedding and the experts that it is not routed to.
    source = open_model(MODEL)
    once = {n: t.nbytes for n, t in source.tensors.items() if len(t.shape) > 1 and n != "token_embd.weight"}
    routed = sum(nbytes for name, nbytes in once.items() if "_exps" in name)
    (alone,) = (f["bytes_per_token"] for f in figures if f["phase"] == "decode" and f["batch"] == 1)
    expected = sum(once.values()) - routed + routed * TOP_K / EXPERTS
    assert alone == expected
