"""Writes what is made from the code, the pages of docs/ first of all: `python scripts/generate_docs.py [--check]`.

    docs/reference/flags.md   from ServerConfig's fields
    docs/reference/commands.md  from the commands' parsers
    docs/reference/coming-from.md  from the flags and metrics of other servers that ours knows
    docs/reference/api/       from the OpenAPI document, one page an API
    docs/reference/operators/ from the catalogue of torch.ops.moeserve, one page an operator
    docs/reference/sampling-parameters.md  from their declaration
    docs/reference/metrics.md  from what /metrics has
    deploy/grafana/dashboards/moeserve.json  its last row, from the declarations of LoadReport

With --check nothing is written, and the exit code is 1 when a page is not what it would be.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from api_reference import API_PAGES, SHARED, ApiReference  # noqa: E402  (beside this file)
from coming_from_reference import coming_from_page  # noqa: E402
from command_reference import commands_page  # noqa: E402
from front_metrics_reference import front_metrics  # noqa: E402
from metrics_reference import dashboard, metrics_page  # noqa: E402
from operator_reference import operator_pages  # noqa: E402
from sampling_reference import sampling_page  # noqa: E402

from moeserve.cli.command_line import flag_name, value_name  # noqa: E402
from moeserve.config import GROUPS, ServerConfig, env_name  # noqa: E402
from moeserve.httpserver.app import openapi_document  # noqa: E402

DASHBOARD = "deploy/grafana/dashboards/moeserve.json"
MADE = "<!-- Made by scripts/generate_docs.py; `make docs` writes it anew. -->"


def flags_page() -> Iterator[str]:
    yield from (
        "# Flags",
        "",
        MADE,
        "",
        "These are the flags of `moeserve serve`; `python launch.py` and plain `moeserve` take the same. A flag",
        "overrides its environment variable, which overrides the default. `moeserve --help` prints this list.",
        "[commands.md](commands.md) has the flags of the other commands.",
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


def api_pages() -> Iterator[tuple[str, Iterable[str]]]:
    """(path, lines) of the index, of each API's page and of the page of shared objects."""
    reference = ApiReference(openapi_document())
    folder = "docs/reference/api"
    yield (
        f"{folder}/README.md",
        (
            "# API reference",
            "",
            MADE,
            "",
            "These pages list every endpoint and field, as `GET /openapi.json` does. A field that is not listed is",
            "dropped, or refused where it would change the answer. [http.md](../http.md) describes the transport:",
            "bodies, streams, errors. The",
            "[compatibility](../compatibility/README.md) pages list other servers' fields. [shared.md](shared.md)",
            "describes the objects that several APIs use.",
            "",
            *reference.index(),
        ),
    )
    for page in API_PAGES:
        yield f"{folder}/{page.name}.md", (f"# {page.title}", "", MADE, "", *reference.page(page.name))
    shared = ("# Objects that several APIs use", "", MADE, "", *reference.page(SHARED))
    yield f"{folder}/{SHARED}.md", shared


def pages() -> Iterator[tuple[str, Iterable[str]]]:
    yield "docs/reference/flags.md", flags_page()
    yield "docs/reference/commands.md", commands_page(MADE)
    yield "docs/reference/coming-from.md", coming_from_page(MADE)
    heading = ("# Sampling parameters", "", MADE, "")
    yield "docs/reference/sampling-parameters.md", (*heading, *sampling_page())
    yield "docs/reference/metrics.md", (*metrics_page(MADE), *front_metrics())
    yield DASHBOARD, dashboard(REPOSITORY / DASHBOARD)
    yield from api_pages()
    for name, lines in operator_pages(REPOSITORY):
        yield f"docs/reference/operators/{name}.md", (lines[0], "", MADE, *lines[1:])


def main() -> int:
    parser = argparse.ArgumentParser(description="Writes the pages of docs/ that are made from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 for a stale page")
    check = parser.parse_args().check
    stale = 0
    for name, lines in pages():
        path, text = REPOSITORY / name, "\n".join(lines).rstrip("\n") + "\n"
        if path.exists() and path.read_text() == text:
            continue
        stale = 1
        if check:
            print(f"{name} is stale: run make docs")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"{name} written")
    return stale if check else 0


if __name__ == "__main__":
    sys.exit(main())
