"""The import rules of docs/architecture.md, read from the source: who may know whom."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "moeserve"
TESTS = PACKAGE.parent / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A child process's own frame: allowed to every process's package, unlike another process's package.
FRAME = {
    "moeserve.process",
    "moeserve.config",
    "moeserve.errors",
    "moeserve.messages",
    "moeserve.logs",
    "moeserve.tracing",
    "moeserve.version",
}

# What a model is loaded from; none of it knows torch.
MODEL_FILES = {
    "moeserve.models.errors",
    "moeserve.models.gguf",
    "moeserve.models.huggingface",
    "moeserve.models.qwen2_split",
    "moeserve.models.regular_file",
    "moeserve.models.source",
}

# What each package may import of ours, besides itself. What is not listed here may import anything of ours.
ALLOWED: dict[str, set[str]] = {
    "moeserve.messages": set(),
    "moeserve.errors": set(),
    "moeserve.config": set(),
    "moeserve.logs": set(),
    "moeserve.tracing": {"moeserve.config", "moeserve.errors", "moeserve.version"},
    "moeserve.version": set(),
    "moeserve.router.core": {"moeserve.messages"},
    "moeserve.router": FRAME,
    "moeserve.detokenizer": FRAME | {"moeserve.tokenizer", "moeserve.models.source"},
    "moeserve.httpserver": FRAME
    | {
        "moeserve.tokenizer",
        "moeserve.models.source",
        "moeserve.grammar",
        "moeserve.chatformat",
        "moeserve.placement.heat",
    },
    "moeserve.tokenizer": {*MODEL_FILES, "moeserve.errors", "moeserve.sandbox"},
    "moeserve.grammar": {
        "moeserve.tokenizer",
        "moeserve.models.source",
        "moeserve.errors",
        "moeserve.sandbox",
    },
    "moeserve.chatformat": set(),
    "moeserve.sandbox": set(),
    "moeserve.models.gguf": {"moeserve.errors", "moeserve.models.errors", "moeserve.models.regular_file"},
    "moeserve.models.huggingface": MODEL_FILES,
    "moeserve.models": {"moeserve.kernels", "moeserve.errors"},
    "moeserve.placement": {
        "moeserve.models.gguf",
        "moeserve.models.qwen3moe.config",
        "moeserve.config",
        "moeserve.errors",
    },
    "moeserve.kernels": {"moeserve.errors"},
    "moeserve.hub": {"moeserve.errors", "moeserve.models.huggingface"},
    "moeserve.cpus": set(),
    "moeserve.worker": FRAME
    | {
        "moeserve.cpus",
        "moeserve.models",
        "moeserve.kernels",
        "moeserve.placement",
        "moeserve.tokenizer",
        "moeserve.grammar",
        "moeserve.dump.format",
    },
    "moeserve.dump": {"moeserve.errors"},
    "moeserve.process": FRAME,
    "moeserve.workload": {"moeserve.errors"},
    "moeserve.simulate": FRAME
    | {"moeserve.workload", "moeserve.router", "moeserve.options", "moeserve.placement.step_tokens"},
    "moeserve.launcher": FRAME | {"moeserve", "moeserve.runtime_directory"},
    "moeserve.runtime_directory": {"moeserve.errors", "moeserve.messages"},
}
TORCH_ALLOWED = (
    "moeserve.worker",
    "moeserve.models",
    "moeserve.kernels",
    "moeserve.plan",
    "moeserve.bench.engine",
)
TORCH_FORBIDDEN_WITHIN = tuple(MODEL_FILES)
# Outside the standard library, the pure core knows only what the messages are made of.
CORE_THIRD_PARTY = {"msgspec"}


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file imports, anywhere in it; `from a import b` is a.b where that is a module."""
    module = name_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{source}.{alias.name}" if is_module(f"{source}.{alias.name}") else source


def is_module(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return path.with_suffix(".py").exists() or path.is_dir()


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def rule_for(module: str) -> str | None:
    """The innermost package with a rule."""
    return max((package for package in ALLOWED if within(module, package)), key=len, default=None)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_of_ours_follow_the_rules(path: Path) -> None:
    module = name_of(path)
    package = rule_for(module)
    if package is None:
        return
    ours = {name for name in imports_of(path) if within(name, "moeserve")}
    # "moeserve" itself is an empty package and no licence for what lies in it.
    forbidden = {
        name
        for name in ours
        if not within(name, package)
        and not any(
            name == allowed if allowed == "moeserve" else within(name, allowed)
            for allowed in ALLOWED[package]
        )
    }
    assert not forbidden, f"{module} may not import {sorted(forbidden)}"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_torch_stays_in_the_worker(path: Path) -> None:
    module = name_of(path)
    torch_allowed = any(within(module, package) for package in TORCH_ALLOWED) and not any(
        within(module, package) for package in TORCH_FORBIDDEN_WITHIN
    )
    if not torch_allowed:
        assert not [name for name in imports_of(path) if name.split(".")[0] in ("torch", "triton")]


def test_router_core_is_pure() -> None:
    """No sockets, no clock, no threads, no libraries: what happens depends on the events alone."""
    impure = {
        "socket",
        "zmq",
        "rpyc",
        "time",
        "datetime",
        "random",
        "threading",
        "asyncio",
        "os",
        "subprocess",
    }
    for path in (PACKAGE / "router" / "core").rglob("*.py"):
        roots = {name.split(".")[0] for name in imports_of(path)}
        assert not roots & impure, path
        assert roots <= sys.stdlib_module_names | CORE_THIRD_PARTY | {"moeserve"}, path


def test_unit_tests_need_no_torch() -> None:
    """Nor what is loaded with it: CI runs them where it is not installed, and says so later than this test."""
    with_torch = ("torch", "triton", "tests.kernels", "tests.worker", "tests.gpu")
    for path in [*TESTS.joinpath("unit").rglob("*.py"), TESTS / "conftest.py"]:
        named = {name for name in imports_of(path) if any(within(name, package) for package in with_torch)}
        assert not named, f"{path.relative_to(TESTS.parent)} imports {sorted(named)}"


def test_the_rules_are_read_from_real_imports() -> None:
    """Guards the reader: relative, nested and renamed imports are all seen."""
    assert "moeserve.messages.codec" in set(imports_of(PACKAGE / "messages" / "channels.py"))
    assert "moeserve.launcher" in set(imports_of(PACKAGE / "cli.py"))
    gguf = set(imports_of(PACKAGE / "models" / "gguf" / "__init__.py"))
    assert "moeserve.models.gguf.file" in gguf
    assert rule_for("moeserve.models.gguf.file") == "moeserve.models.gguf"
    assert rule_for("moeserve.router.core.scheduler") == "moeserve.router.core"
    assert rule_for("moeserve.router.manager") == "moeserve.router"
