"""Whether a tag is a release of this commit: `python scripts/check_release.py v1.2.3`.

The tag is `v` and the version of `moeserve/__init__.py`, and CHANGELOG.md has an entry of that version with a date and
nothing left under "Unreleased". The entry goes to standard output, as the release's notes. Exit code 0; 1 with what is
wrong on standard error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def entries(changelog: str) -> dict[str, str]:
    """Text by the heading between `## [` and the end of its line, in the file's order."""
    parts = re.split(r"^## \[(.+)$", changelog, flags=re.MULTILINE)
    return dict(zip(parts[1::2], (text.strip() for text in parts[2::2]), strict=True))


def problems(tag: str, version: str, found: dict[str, str]) -> list[str]:
    wrong = []
    if tag != f"v{version}":
        wrong.append(f"the tag is {tag}, and moeserve/__init__.py has {version}")
    if found.get("Unreleased]"):
        wrong.append('CHANGELOG.md has entries under "Unreleased"')
    if not any(re.fullmatch(rf"{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading) for heading in found):
        wrong.append(f"CHANGELOG.md has no entry of {version} with a date")
    return wrong


def main(tag: str, repository: Path = REPOSITORY) -> int:
    declared = re.search(
        r'^__version__ = "(.+)"$', (repository / "moeserve/__init__.py").read_text(), re.MULTILINE
    )
    assert declared is not None
    found = entries((repository / "CHANGELOG.md").read_text())
    wrong = problems(tag, declared[1], found)
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print(next(text for heading, text in found.items() if heading.startswith(f"{declared[1]}]")))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
