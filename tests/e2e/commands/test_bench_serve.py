"""`bench serve` on a real server: its counts are the server's own, and every way of asking works."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moeserve.cli.bench import serve as bench_serve
from moeserve.cli.simulate.step_time import StepLoad, read_step_time
from tests.support.servers.server import REPOSITORY, Server, clean_environment

SMALL = "--input-len 40 --output-len 12 --range-ratio 0.5 --ignore-eos --disable-tqdm"


def moeserve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moeserve", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, env=clean_environment(), timeout=100
    )


def bench(server: Server, folder: Path, asked: str) -> dict[str, Any]:
    """The saved result; raises when the command failed."""
    saved = folder / "result.json"
    arguments = [
        *SMALL.split(),
        "--url",
        server.base_url,
        *asked.split(),
        "--save-result",
        str(saved),
        "--save-detailed",
    ]
    assert bench_serve.main(arguments) == 0
    result: dict[str, Any] = json.loads(saved.read_bytes())
    return result


@pytest.mark.parametrize(
    "asked",
    [
        "--num-prompts 24 --request-rate 60",
        "--num-prompts 24 --max-concurrency 4 --text-prompts",
        "--num-prompts 16 --dataset shared-prefix --prefix-len 100 --num-prefixes 2 --max-concurrency 8",
        "--num-prompts 12 --dataset multi-turn --num-turns 4 --prefix-len 60 --think-time 0.05",
        "--num-prompts 8 --dataset long-among-short --long-every 4 --long-input-len 900",
    ],
    ids=["poisson", "text, 4 at once", "shared prefix", "conversations", "long among short"],
)
def test_counts_are_the_servers_own(server: Server, tmp_path: Path, asked: str) -> None:
    before = server.metrics()
    result = bench(server, tmp_path, asked)
    after = server.metrics()
    assert result["completed"] == result["num_prompts"]
    assert result["failed"] == 0
    # Beside the requests there are at most three of a few tokens that ask what the server takes.
    more = {
        name: after[f"moeserve:{name}_tokens_total"] - before[f"moeserve:{name}_tokens_total"]
        for name in ("prompt", "generation")
    }
    assert 0 <= more["generation"] - result["total_output_tokens"] <= 4
    assert 0 <= more["prompt"] - result["total_input_tokens"] <= 1000
    assert all(6 <= length <= 18 for length in result["output_lens"])
    for ttft, itls, latency in zip(result["ttfts"], result["itls"], result["latencies"], strict=True):
        assert 0 < ttft <= latency
        assert latency == pytest.approx(ttft + sum(itls))
    assert 0 < result["mean_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["output_throughput"] == pytest.approx(result["total_output_tokens"] / result["duration"])


def test_token_ids_keep_their_lengths(server: Server, tmp_path: Path) -> None:
    """Conversations too: each prompt is the prompt before, its answer's tokens, and the new ones."""
    trace = tmp_path / "t.jsonl"
    result = bench(server, tmp_path, f"--num-prompts 12 --num-turns 3 --prefix-len 30 --save-trace {trace}")
    assert result["prompt_format"] == "token ids"
    asked = [json.loads(line) for line in trace.read_text().splitlines()]
    assert sorted(result["input_lens"]) == sorted(line["prompt_len"] for line in asked)
    assert sorted(result["output_lens"]) == sorted(line["output_len"] for line in asked)


def test_chat(server: Server, tmp_path: Path) -> None:
    result = bench(server, tmp_path, "--num-prompts 6 --num-turns 3 --prefix-len 40 --backend openai-chat")
    assert result["prompt_format"] == "chat messages"
    assert result["completed"] == 6
    assert result["total_output_tokens"] == sum(result["output_lens"])


def test_goodput_separates_what_keeps_its_objective(server: Server, tmp_path: Path) -> None:
    asked = "--num-prompts 10 --max-concurrency 2"
    easy = bench(server, tmp_path, f"{asked} --goodput ttft:60000 tpot:60000,itl:60000 e2el:60000")
    assert easy["request_goodput"] == easy["request_throughput"]
    assert bench(server, tmp_path, f"{asked} --goodput ttft:0.001")["request_goodput"] == 0


def test_failures_are_counted_and_shown(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """2,100 tokens do not fit the tiny model: two requests of eight fail, and the exit code says so."""
    saved, plot = tmp_path / "r.json", tmp_path / "p.svg"
    asked = f"{SMALL} --num-prompts 8 --long-every 4 --long-input-len 2100 --range-ratio 0 --url {server.base_url}/v1"
    code = bench_serve.main([*asked.split(), "--save-result", str(saved), "--plot", str(plot)])
    shown = capsys.readouterr()
    assert code == 1
    assert json.loads(saved.read_bytes())["failed"] == 2
    assert "Failed requests:                         2" in shown.out
    assert "2 x HTTP 400" in shown.err
    assert plot.read_text().startswith("<svg")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--url http://127.0.0.1:9", "127.0.0.1:9"),
        ("--url {url} --model nobody", "HTTP 404"),
        ("--url {url} --extra-body {{\"temperature\":9}}", "HTTP 400"),
        ("--url {url} --extra-body 5", "must be a JSON object"),
        ("--url {url} --extra-body {{", "not JSON"),
        ("--url {url} --trace /no/such/file", "No such file"),
        ("--url {url} --text-prompts --backend openai-chat", "--text-prompts has no effect"),
        ("--url {url} --against-engine=--threads=1", "leave --url, --host and --port out"),
        ("--port 9 --against-engine=--threads=1", "leave --url, --host and --port out"),
        ("--url {url} --port 9", "--url has the host and the port"),
        ("--port 9", "no server answers at http://127.0.0.1:9:"),
        ("--port 0", "argument --port: must be between 1 and 65535, not 0"),
        ("--port 65536", "argument --port: must be between 1 and 65535, not 65536"),
        ("--host=", "argument --host: must not be empty"),
        ("--host ::1 --port 9", "no server answers at http://[::1]:9:"),
        ("--against-engine=--no-such-flag", "unrecognized arguments: --no-such-flag"),
        ("--against-engine=--port=80", "leave --host, --port and --uds out"),
        ("--against-engine=--model=/no/such/file", "there is no /no/such/file"),
    ],
)  # fmt: skip
def test_what_the_user_can_mend_is_said(server: Server, arguments: str, message: str) -> None:
    run = moeserve("bench", "serve", *arguments.format(url=server.base_url).split())
    assert run.returncode == 2
    assert message in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_the_server_and_its_engine_side_by_side(tiny_model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "result.json"
    asked = "--num-prompts 12 --input-len 40 --output-len 10 --max-concurrency 4 --disable-tqdm"
    run = moeserve(
        *("bench", "serve", "--against-engine", f"--model {tiny_model} --threads 1 --device cpu"),
        *(*asked.split(), "--save-result", str(saved)),
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(saved.read_bytes())
    assert (result["completed"], result["total_output_tokens"]) == (12, 120)
    computed = 12 * 40 / result["engine_prefill_throughput"] + 120 / result["engine_decode_throughput"]
    assert result["engine_duration"] == pytest.approx(computed)
    assert result["engine_share"] == pytest.approx(computed / result["duration"])
    assert "The Engine Alone" in run.stdout
    assert "Decode at 4 (tok/s):" in run.stdout


def test_the_api_key_comes_from_the_environment(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This server needs none; that it is sent as OpenAI's clients send it is what counts."""
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert bench_serve.request_headers()["authorization"] == "Bearer secret"
    assert bench(server, tmp_path, "--num-prompts 2")["completed"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seqs", "step_tokens", "sizes", "decoded"),
    [
        pytest.param(12, 64, [8, 16, 32, 64], [1, 2, 4, 8], id="usual"),
        pytest.param(1, 32, [1, 8, 16, 32], [], id="one sequence", marks=pytest.mark.slow),
        pytest.param(
            4, 2048, [8, 16, 32, 64, 128, 256, 512], [1, 2, 4], id="steps longer than the context allows",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_bench_steps_measures_a_model_that_the_simulator_takes(
    tiny_model: Path, tmp_path: Path, seqs: int, step_tokens: int, sizes: list[int], decoded: list[int]
) -> None:
    """In a process of its own, whose threads end with it."""
    path = tmp_path / "steps.json"
    asked = (
        f"--model {tiny_model} --max-num-seqs {seqs} --max-num-batched-tokens {step_tokens} --output {path}"
    )
    run = moeserve("bench", "steps", *asked.split())
    assert run.returncode == 0, run.stderr
    model = read_step_time(path)
    assert (model.tokens, model.decode_rows) == (sizes, decoded)
    assert (model.num_experts, model.experts_per_token) == (8, 2)
    assert 0 < model.of(StepLoad(1, 10, 0, 1)) < model.of(StepLoad(512, 0, 512 * 500, 0, 1, 512))
    assert f"{model.seconds[-1] * 1e3:.2f}" in run.stdout
