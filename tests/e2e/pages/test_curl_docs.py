"""Every curl command of README.md and of docs/, run as it stands, but for the address, against a real server."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.servers.server import REPOSITORY, Server, running_server

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
ADDRESS = re.compile(r"(http://)?(localhost|127\.0\.0\.1):8000")
LORA = "docs/how-to/lora.md"  # its commands need adapters, and follow on one another
CODE = "docs/how-to/complete-code-in-an-editor.md"


class Example(NamedTuple):
    page: str
    line: int
    command: str


def commands_of(page: str, text: str) -> Iterator[Example]:
    """Those in blocks of code. A command ends with the line on which its quotes are closed and nothing goes on."""
    lines = text.splitlines()
    is_code, begun = False, 0
    pending: list[str] = []
    for number, line in enumerate(lines, 1):
        if not pending and line.lstrip().startswith("```"):
            is_code = not is_code
        if pending or (is_code and re.match(r"\s*curl\s", line)):
            begun = begun if pending else number
            pending.append(line)
            if _is_whole("\n".join(pending)):
                yield Example(page, begun, "\n".join(pending).strip())
                pending = []
    assert not pending, f"{page}:{begun}: a command without an end"


def _is_whole(command: str) -> bool:
    if command.endswith("\\"):
        return False
    try:
        shlex.split(command)
    except ValueError:
        return False
    return True


def pages() -> list[Path]:
    return [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]


EXAMPLES = [
    example
    for page in pages()
    for example in commands_of(str(page.relative_to(REPOSITORY)), page.read_text())
]


def run(example: Example, base_url: str, folder: Path) -> str:
    """Returns what the command printed or wrote. Fails if the server answered with an error."""
    command, replaced = ADDRESS.subn(base_url, example.command)
    assert replaced == 1, f"{example.page}:{example.line}: another server's address"
    done = subprocess.run(
        ["bash", "-euc", command], capture_output=True, text=True, timeout=240, cwd=folder, check=False
    )
    assert done.returncode == 0, done.stderr
    written = "".join(file.read_text() for file in folder.iterdir())
    answer = done.stdout + written
    assert answer.strip(), f"{example.page}:{example.line}: no answer"
    assert '"error":' not in answer, f"{example.page}:{example.line}: {answer}"
    return answer


def test_the_pages_are_read() -> None:
    found = {example.page for example in EXAMPLES}
    assert {"README.md", "docs/tutorial/quickstart.md", LORA, "docs/how-to/place-experts.md"} <= found
    mentioned = sum(len(re.findall(r"^\s*curl\s", page.read_text(), re.MULTILINE)) for page in pages())
    assert len(EXAMPLES) == mentioned >= 14


@pytest.mark.parametrize(
    "example",
    [example for example in EXAMPLES if example.page not in (LORA, CODE)],
    ids=lambda example: f"{example.page}:{example.line}",
)
def test_command(demonstration: Server, example: Example, tmp_path: Path) -> None:
    answer = run(example, demonstration.base_url, tmp_path)
    if not answer.startswith("data: "):
        json.loads(answer)


def test_the_command_for_editors_needs_a_model_for_code(demonstration: Server, tmp_path: Path) -> None:
    (example,) = (example for example in EXAMPLES if example.page == CODE)
    with pytest.raises(AssertionError, match="no tokens for fill-in-the-middle"):
        run(example, demonstration.base_url, tmp_path)


@pytest.mark.slow
@pytest.mark.cpu_engine("adapters")
def test_commands_about_adapters(tmp_path: Path) -> None:
    """The first is of an adapter that is there; the others load and unload one."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tests.support.models.hugging_face_model import read_model, write_model
    from tests.support.models.peft_adapters import ATTENTION, write_adapter

    write_model(tmp_path / "model")
    write_adapter(
        tmp_path / "sql-2026-11",
        read_model(tmp_path / "model"),
        0,
        r=4,
        lora_alpha=8,
        target_modules=ATTENTION,
    )
    complete, load, unload = (example for example in EXAMPLES if example.page == LORA)
    empty = tmp_path / "empty"
    empty.mkdir()
    with running_server(tmp_path / "model", "--lora-dir", str(tmp_path)) as server:
        for example in (load, complete, unload):
            run(example, server.base_url, empty)
        names = [card["id"] for card in httpx.get(server.base_url + "/v1/models").json()["data"]]
        assert "sql" not in names
