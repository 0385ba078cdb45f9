"""Programs that measure servers and models, as their registries have them, against the real server: no request fails.

They need MOESERVE_CLIENTS, a folder with `venv-lm-eval`, `venv-guidellm` and `promptfoo` that `make test-clients`
makes. What they download by default (data sets, tokenizers) is here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import TINY_MODEL
from tests.support.servers.server import Server

CLIENTS = os.environ.get("MOESERVE_CLIENTS")
NAME = "tiny-qwen3moe-q4_k_m"
TIMEOUT_S = 200

pytestmark = [
    pytest.mark.skipif(CLIENTS is None, reason="run make test-clients"),
    pytest.mark.timeout(TIMEOUT_S + 60),
]


def run(command: list[str], folder: Path, **environment: str) -> str:
    root = Path(str(CLIENTS)).resolve()
    path = f"{root / 'node' / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [str(root / command[0]), *command[1:]],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        cwd=folder,
        env={"PATH": path, "HOME": str(folder), "HF_HUB_OFFLINE": "1"} | environment,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of two tasks for lm-eval: one of choices by their log probabilities, one of answers."""
    rows = [{"q": f"Fox {i} jumps over the", "choices": ["lazy dog", "moon"], "a": i % 2} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    common: dict[str, Any] = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
    }
    choices: dict[str, Any] = {
        "task": "choices",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
    }
    choices |= {"doc_to_target": "a", "metric_list": [{"metric": "acc"}]}
    answers: dict[str, Any] = {"task": "answers", "output_type": "generate_until", "doc_to_target": "dog"}
    answers |= {
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 16},
        "metric_list": [{"metric": "exact_match"}],
    }
    for task in (choices, answers):
        (tmp_path / f"{task['task']}.yaml").write_text(json.dumps(common | task))
    return tmp_path


@pytest.mark.parametrize(
    ("kind", "path", "options", "names"),
    [
        ("local-completions", "completions", "tokenizer_backend=remote", "choices,answers"),
        (
            "local-completions",
            "completions",
            "tokenizer_backend=remote,tokenized_requests=False",
            "choices,answers",
        ),
        ("local-chat-completions", "chat/completions", "num_concurrent=2", "answers"),
    ],
)
def test_lm_eval(server: Server, tasks: Path, kind: str, path: str, options: str, names: str) -> None:
    arguments = f"model={NAME},base_url={server.base_url}/v1/{path},max_retries=1,{options}"
    chat = ["--apply_chat_template"] if "chat" in kind else []
    command = ["venv-lm-eval/bin/lm_eval", "run", "--model", kind, "--model_args", arguments, *chat]
    said = run([*command, "--tasks", names, "--include_path", str(tasks)], tasks)
    for name, metric in (("choices", "acc"), ("answers", "exact_match")):
        assert (name in names) == any(
            name in line and metric in line for line in said.splitlines() if "|" in line
        )


def test_guidellm(server: Server, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(TINY_MODEL.parent, gguf_file=TINY_MODEL.name).save_pretrained(
        tmp_path / "tok"
    )
    command = ["venv-guidellm/bin/guidellm", "run", "--disable-console-interactive"]
    command += ["--backend", f"kind=openai_http,target={server.base_url},model={NAME}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={tmp_path / 'tok'}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8"]
    said = run([*command, "--output", "kind=json,path=report.json"], tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0), said[-2000:]


def test_promptfoo(server: Server, tmp_path: Path) -> None:
    """Over four APIs."""
    if shutil.which("node") is None:
        pytest.skip("node is not installed")
    openai = {"apiBaseUrl": server.base_url + "/v1", "apiKey": "none"}
    providers: list[dict[str, Any]] = [
        {"id": f"openai:{kind}:{NAME}", "config": openai | {bound: 16}}
        for kind, bound in (
            ("chat", "max_tokens"),
            ("completion", "max_tokens"),
            ("responses", "max_output_tokens"),
        )
    ]
    anthropic = {"apiBaseUrl": server.base_url, "apiKey": "none", "max_tokens": 16}
    providers.append({"id": f"anthropic:messages:{NAME}", "config": anthropic})
    says = {"type": "javascript", "value": "output.length > 0"}
    tests = [{"vars": {"topic": topic}, "assert": [says]} for topic in ("foxes", "dogs")]
    asked = {"prompts": ["Tell me of {{topic}}."], "providers": providers, "tests": tests}
    (tmp_path / "promptfooconfig.json").write_text(json.dumps(asked))
    command = [
        "promptfoo/node_modules/.bin/promptfoo",
        "eval",
        "-c",
        "promptfooconfig.json",
        "--no-cache",
        "-o",
        "out.json",
    ]
    run(command, tmp_path, PROMPTFOO_DISABLE_TELEMETRY="1", PROMPTFOO_DISABLE_UPDATE="1")
    assert json.loads((tmp_path / "out.json").read_text())["results"]["stats"]["successes"] == 8
