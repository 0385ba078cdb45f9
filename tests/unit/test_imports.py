"""The import rules of docs/explanation/architecture.md, read from the source: who may know whom."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from tests.support.rules.http_import_rules import HTTPSERVER
from tests.support.rules.import_rules import ALLOWED
from tests.support.rules.layer_rules import (
    CORE_THIRD_PARTY,
    IMPORTED_FROM_ABOVE,
    MEMORIES,
    MEMORY_PARTS,
    MEMORY_SEEN,
    TORCH_ALLOWED,
    TORCH_FORBIDDEN_WITHIN,
)
from tests.support.rules.model_import_rules import FAMILIES, PACKAGE
from tests.support.rules.source_imports import (
    imports_in,
    imports_of,
    name_of,
    parsed_imports,
    read_imports,
    way_to_torch,
    within,
)

TESTS = PACKAGE.parent / "tests"
MODULES = sorted(PACKAGE.rglob("*.py"))


def rule_for(module: str) -> str | None:
    """The innermost package with a rule."""
    return max((package for package in ALLOWED if within(module, package)), key=len, default=None)


def test_imports_of_ours_follow_the_rules() -> None:
    forbidden = {name_of(path): found for path in MODULES if (found := forbidden_imports(path))}
    assert not forbidden


def forbidden_imports(path: Path) -> list[str]:
    module = name_of(path)
    package = rule_for(module)
    if package is None:
        return []
    ours = {name for name in imports_of(path) if within(name, "moeserve")}
    # "moeserve" itself is an empty package and no licence for what lies in it.
    return sorted(
        name
        for name in ours
        if not within(name, package)
        and not any(
            name == allowed if allowed == "moeserve" else within(name, allowed)
            for allowed in ALLOWED[package]
        )
    )


def test_torch_stays_in_the_worker() -> None:
    for path in MODULES:
        module = name_of(path)
        torch_allowed = any(within(module, package) for package in TORCH_ALLOWED) and not any(
            within(module, package) for package in TORCH_FORBIDDEN_WITHIN
        )
        if not torch_allowed:
            assert not [name for name in imports_of(path) if name.split(".")[0] in ("torch", "triton")], path


def test_only_models_name_architectures() -> None:
    """The next architecture touches its own package and the registry. Names of other servers' parsers are no
    architectures, though some are spelled alike."""
    for path in MODULES:
        if not within(name_of(path), "moeserve.models") and name_of(path) != "moeserve.cli.parser_names":
            named = {name for name in imports_of(path) if any(within(name, family) for family in FAMILIES)}
            assert not named, path
            text = path.read_text()
            assert not [family for family in FAMILIES if family.rpartition(".")[2] in text], path


def test_a_family_is_named_by_the_registry_alone() -> None:
    for path in (PACKAGE / "models").rglob("*.py"):
        named = {f for name in imports_of(path) for f in FAMILIES if within(name, f)}
        if name_of(path) != "moeserve.models.registry":
            assert named <= {f for f in FAMILIES if within(name_of(path), f)}, path


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


def test_the_router_knows_one_memory() -> None:
    """What is behind `SequenceMemory` is named by it alone; the scheduler makes the one that there is."""
    for path in (PACKAGE / "router").rglob("*.py"):
        module = name_of(path)
        if any(within(module, one) for one in MEMORIES):
            continue
        named = {
            name for name in imports_of(path) if any(within(name, one) for one in MEMORIES)
        } - MEMORY_SEEN
        if module == "moeserve.router.core.scheduler":
            named.remove("moeserve.router.core.kv_memory")
        assert not named, path
        if within(module, "moeserve.router.core"):
            read = {
                node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            }
            assert not read & MEMORY_PARTS, path


def test_every_folder_of_httpserver_has_a_rule() -> None:
    folders = {
        f"moeserve.httpserver.{path.name}"
        for path in (PACKAGE / "httpserver").iterdir()
        if (path / "__init__.py").exists()
    }
    assert folders == set(HTTPSERVER)


def test_the_files_of_httpserver_import_one_another_in_one_direction() -> None:
    """No file imports itself through others."""
    files = {name_of(path): path for path in (PACKAGE / "httpserver").rglob("*.py")}
    imports = {
        name: {one for one in imports_of(path) if one in files and one != name}
        for name, path in files.items()
    }
    left = dict(imports)
    while free := [name for name, of in left.items() if not of & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"in a circle, or above one: {sorted(left)}"


def test_packages_import_one_another_in_one_direction() -> None:
    """A package, or a file beside the packages, does not import itself through others."""
    left: dict[str, set[str]] = {room_of(name_of(path)): set() for path in MODULES}
    for path in MODULES:
        room = room_of(name_of(path))
        left[room] |= {room_of(name) for name in imports_of(path) if within(name, "moeserve")} - {room, ""}
    while free := [name for name, of in left.items() if not of & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"in a circle, or above one: {sorted(left)}"


def test_the_entries_of_a_folder_import_one_another_in_one_direction() -> None:
    """Within each package: no file or folder imports itself through its neighbours."""
    for path in PACKAGE.rglob("__init__.py"):
        package = name_of(path)
        left: dict[str, set[str]] = {}
        for module in path.parent.rglob("*.py"):
            if (entry := _entry(name_of(module), package)) is not None:
                found = {_entry(name, package) for name in imports_of(module)} - {entry, None}
                left.setdefault(entry, set()).update(name for name in found if name is not None)
        while free := [entry for entry, of in left.items() if not of & left.keys()]:
            for entry in free:
                del left[entry]
        assert not left, f"in {package}, in a circle, or above one: {sorted(left)}"


def _entry(module: str, package: str) -> str | None:
    """The file or folder of a package that a module belongs to; None: it is elsewhere, or the package itself."""
    return module[len(package) + 1 :].split(".")[0] if module.startswith(package + ".") else None


MOST_ENTRIES = {"": 24, "worker": 12, "router/core": 12, "httpserver/generation": 12}


def test_folders_have_few_entries() -> None:
    """What a stranger sees at one glance; a package's own `__init__` and `__main__` do not count."""
    for folder, most in MOST_ENTRIES.items():
        entries = [path.name for path in (PACKAGE / folder).iterdir() if not path.name.startswith("__")]
        assert len(entries) <= most, f"{folder or 'moeserve'}: {sorted(entries)}"


def room_of(module: str) -> str:
    """The part of `moeserve` that it belongs to: the first name behind it, "" for the package itself."""
    return module.split(".")[1] if "." in module else ""


def test_what_is_above_the_processes_is_imported_from_above_alone() -> None:
    for path in MODULES:
        for above, allowed in IMPORTED_FROM_ABOVE.items():
            if not any(within(name_of(path), one) for one in (above, *allowed)):
                assert not [name for name in imports_of(path) if within(name, above)], path


def test_commands_need_no_torch_to_begin() -> None:
    """It takes two seconds to import, in each process: of `moeserve list` and `plan`, and of each model of a front."""
    for name in (
        "models.list",
        "models.show",
        "models.model_needs",
        "plan.command",
        "simulate.command",
        "completion",
    ):
        assert not (way := way_to_torch(f"moeserve.cli.{name}")), " -> ".join(way)


def test_the_rules_are_read_from_real_imports() -> None:
    """Guards the reader: relative, nested and renamed imports are all seen."""
    for path in MODULES[::40]:
        assert read_imports(path) == parsed_imports(path.read_text(), path), path
    assert "moeserve.messages.codec" in set(imports_of(PACKAGE / "messages" / "channels.py"))
    assert "moeserve.launcher.launch" in set(imports_of(PACKAGE / "cli" / "main.py"))
    gguf = set(imports_of(PACKAGE / "models" / "sources" / "gguf" / "__init__.py"))
    assert "moeserve.models.sources.gguf.file" in gguf
    assert rule_for("moeserve.models.sources.gguf.file") == "moeserve.models.sources.gguf"
    assert rule_for("moeserve.router.core.scheduler") == "moeserve.router.core"
    assert rule_for("moeserve.router.manager") == "moeserve.router"


@pytest.mark.parametrize(
    "source",
    [
        '# """\nimport torch\nx = 1  # """\n',
        'x = \'"""\'\nimport torch\ny = \'"""\'\n',
        "x = 1; import torch\n",
        "import os; import torch\n",
        "if True: import torch\n",
        "from os import path; from torch import nn\n",
        "import os, \\\n    torch\n",
        "def f():\n    try: import torch\n    except ImportError: pass\n",
    ],
)
def test_an_import_in_an_unusual_place_is_seen(source: str) -> None:
    here = PACKAGE / "errors.py"
    found = imports_in(source, here)
    assert found == parsed_imports(source, here)
    assert {name.split(".")[0] for name in found.anywhere} & {"torch"}


@pytest.mark.slow
def test_no_import_is_overlooked() -> None:
    for path in (*MODULES, *TESTS.rglob("*.py")):
        assert read_imports(path) == parsed_imports(path.read_text(), path), path


def test_no_child_runs_files_of_the_working_directory() -> None:
    """A user's project may have a types.py: with -P a child does not look for modules where it was started. The
    launcher's successor is started as the launcher was."""
    for path in MODULES:
        text = path.read_text()
        started = len(re.findall(r"\bsys\.executable,", text))
        isolated = len(re.findall(r"\bsys\.executable,\s*\"-P\"", text))
        assert started - isolated == (name_of(path) == "moeserve.launcher.succession"), path
