"""schemathesis over the whole OpenAPI document: thousands of requests that fit it and that do not, and no 5xx."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.server import running_server

CASES = 10_000
# For each operation, beside what schemathesis derives from the document itself. It makes what fits the document slowly,
# and cannot make both kinds in one run: from "not of these items" it asks for an element that there is none of.
EXAMPLES = {"positive": 200, "negative": 600}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_no_generated_request_is_a_server_error(tmp_path: Path) -> None:
    """With a short context, so that what is valid ends soon."""
    with running_server(None, "--max-model-len", "48") as server:
        generated = sum(run_cases(server.base_url, mode, count, tmp_path) for mode, count in EXAMPLES.items())
        log = server.log
    assert generated >= CASES
    assert "Traceback" not in log


def run_cases(url: str, mode: str, examples: int, folder: Path) -> int:
    """How many requests were generated, all of which have passed; AssertionError otherwise."""
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "run", url + "/openapi.json", "--mode", mode),
        *("--max-examples", str(examples), "--checks", "not_a_server_error", "--workers", "1", "--no-color"),
    ]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert run.returncode == 0, run.stdout[-5000:]
    found = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
    assert found is not None, run.stdout[-2000:]
    generated, passed = map(int, found.groups())
    assert generated == passed
    return generated
