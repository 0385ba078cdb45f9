"""Writes the pages of docs/ that are made from the code: `python scripts/generate_docs.py [--check]`.

    docs/flags.md   from ServerConfig's fields
    docs/api.md     from the OpenAPI document

With --check nothing is written, and the exit code is 1 when a page is not what it would be.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from api_reference import markdown  # noqa: E402  (beside this file)

from moeserve.config import GROUPS, ServerConfig, env_name  # noqa: E402
from moeserve.httpserver.app import openapi_document  # noqa: E402
from moeserve.options import flag_name, value_name  # noqa: E402

MADE = "<!-- Made by scripts/generate_docs.py; `make docs` writes it anew. -->"


def flags_page() -> Iterator[str]:
    yield from (
        "# Flags",
        "",
        MADE,
        "",
        "Of `moeserve serve`, which `python launch.py` and plain `moeserve` are too. A flag wins over its environment",
        "variable, which wins over the default. `moeserve --help` prints the same; `--help` after `plan`, `bench`,",
        "`simulate` or `compare-dumps` has the flags of the other commands.",
        "",
    )
    for group in GROUPS:
        yield from (f"## {group}", "", "| flag, variable | value | default | |", "|---|---|---|---|")
        for option in dataclasses.fields(ServerConfig):
            if option.metadata["group"] == group:
                default = "" if option.default in (None, "", ()) else f"`{option.default}`"
                names = f"`{flag_name(option.name)}`<br>`{env_name(option.name)}`"
                yield f"| {names} | {value_name(option)} | {default} | {option.metadata['help']} |"
        yield ""


def api_page() -> Iterator[str]:
    yield from (
        "# API reference",
        "",
        MADE,
        "",
        "The same as `GET /openapi.json`. How the endpoints behave, and what errors look like:",
        "[serving.md](serving.md); what other servers' fields are here: [compatibility.md](compatibility.md).",
        "A field that is not listed is refused with status 400.",
        "",
    )
    yield from markdown(openapi_document())


PAGES = {"docs/flags.md": flags_page, "docs/api.md": api_page}


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the pages of docs/ that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 for a stale page")
    check = parser.parse_args().check
    stale = 0
    for name, page in PAGES.items():
        path, text = REPOSITORY / name, "\n".join(page()).rstrip("\n") + "\n"
        if path.exists() and path.read_text() == text:
            continue
        stale = 1
        if check:
            print(f"{name} is stale: run make docs")
        else:
            path.write_text(text)
            print(f"{name} written")
    return stale if check else 0


if __name__ == "__main__":
    sys.exit(main())
