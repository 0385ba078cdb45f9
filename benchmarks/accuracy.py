"""How far the served distributions are from the truth, beside llama.cpp's, for each fixture: a table.

    python -m benchmarks.accuracy --fixtures tests/fixtures
    python -m benchmarks.accuracy --fixtures DIR --only q8_0 --url http://127.0.0.1:8000

`tests/support/measuring/accuracy.py` says what a fixture is and what is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.measuring.accuracy import Fixture, measure, table
from tests.support.servers.server import running_server


@contextmanager
def _server_for(arguments: argparse.Namespace, name: str) -> Iterator[str]:
    if arguments.url:
        yield arguments.url.rstrip("/")
        return
    with running_server(arguments.model or arguments.fixtures / f"{name}.gguf") as server:
        yield server.base_url


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fixtures", type=Path, required=True, help="the folder with the .golden.json files")
    parser.add_argument("--only", default="", help="only fixtures with this in their name")
    parser.add_argument("--url", help="a running server that serves the one fixture chosen")
    parser.add_argument(
        "--model", type=Path, help="the model's file (default: NAME.gguf beside NAME.golden.json)"
    )
    arguments = parser.parse_args()

    files = sorted(f for f in arguments.fixtures.glob("*.golden.json") if arguments.only in f.name)
    if not files:
        parser.error(f"no *{arguments.only}*.golden.json in {arguments.fixtures}")
    if (arguments.url or arguments.model) and len(files) > 1:
        parser.error("--url and --model need --only to choose one fixture")
    reports = []
    for file in files:
        fixture = Fixture.load(file)
        with _server_for(arguments, fixture.name) as url:
            reports.append(measure(url, fixture))
    print(table(reports))


if __name__ == "__main__":
    main()
