"""What tests may import: no other tests, no torch where it is not installed, nothing that takes seconds to collect."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.support.rules.model_import_rules import PACKAGE
from tests.support.rules.source_imports import imports_of, way_to_torch, within

TESTS = PACKAGE.parent / "tests"


def test_no_test_imports_another_test_or_a_benchmark() -> None:
    """What tests share is in tests/support, or beside them in a module of its own name. Only files whose text may have
    such an import are parsed: parsing all takes seconds."""
    may_import = re.compile(
        r"\bbenchmarks\b|\bimport\b.*test_|\.test_|^\s+test_\w+( as \w+)?,?$", re.MULTILINE
    )
    for path in TESTS.rglob("*.py"):
        if not may_import.search(path.read_text()):
            continue
        shared = [
            name
            for name in imports_of(path)
            if within(name, "benchmarks")
            or any(part.startswith("test_") for part in name.split(".")[1:] if name.startswith("tests."))
        ]
        assert not shared, f"{path.relative_to(TESTS.parent)} imports {shared}"


def test_unit_tests_need_no_torch() -> None:
    """Nor do those of processes, nor what is loaded with them: CI runs both where torch is not installed, and says so
    later than this test."""
    with_torch = ("torch", "triton", "tests.kernels", "tests.worker", "tests.gpu")
    files = [path for room in ("unit", "httpserver", "processes") for path in (TESTS / room).rglob("*.py")]
    for path in [*files, TESTS / "conftest.py"]:
        named = {name for name in imports_of(path) if any(within(name, package) for package in with_torch)}
        assert not named, f"{path.relative_to(TESTS.parent)} imports {sorted(named)}"
        for name in imports_of(path):
            assert not (way := way_to_torch(name)), (
                f"{path.relative_to(TESTS.parent)} imports {' -> '.join(way)}"
            )


def test_unit_tests_ask_no_other_process_over_http() -> None:
    """Tests that do are in tests/httpserver."""
    servers = {
        *(f"tests.support.servers.{name}" for name in ("family_server", "forked_process", "fresh_server")),
        "tests.support.servers.http_harness",
        "tests.support.pictures.visual_server",
    }
    assert all(TESTS.parent.joinpath(*name.split(".")).with_suffix(".py").exists() for name in servers)
    for path in TESTS.joinpath("unit").rglob("*.py"):
        named = imports_of(path) & servers
        assert not named, f"{path.relative_to(TESTS.parent)} imports {sorted(named)}"


def test_tests_import_what_takes_seconds_when_they_run() -> None:
    """Each process that runs tests collects all of them first, and imports what their modules do."""
    take_seconds = {"anthropic", "openai", "peft", "transformers"}
    for path in TESTS.rglob("*.py"):
        source = path.read_text()
        if not path.is_relative_to(TESTS / "e2e" / "clients" / "programs") and any(
            name in source for name in take_seconds
        ):
            named = take_seconds & {name.split(".")[0] for name in imported_at_once(source)}
            assert not named, (
                f"{path.relative_to(TESTS.parent)} imports {sorted(named)} where it is collected"
            )


def imported_at_once(source: str) -> Iterator[str]:
    """What a module imports before it does anything."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
