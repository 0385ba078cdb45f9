"""Commit messages: a subject with its scope, of at most 72 characters, an empty line, and a body that says why.

    python scripts/check_commit_messages.py .git/COMMIT_EDITMSG    one message, as git's commit-msg hook calls it
    python scripts/check_commit_messages.py --range main..HEAD     those of a range, but for merges

Where git itself writes the subject (a merge, a revert, a fixup to be squashed) no body is needed. Exit code 1 and what
is wrong on standard error, or 0.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

MAX_SUBJECT = 72
SCOPED = re.compile(r"[a-z][\w./, -]*: \S")
BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")
SCISSORS = "# ------------------------ >8"  # git commit --verbose: the diff follows


def problems(message: str) -> list[str]:
    """What is wrong with a message, in words; comments of git's editor are no part of it."""
    text = message.partition(SCISSORS)[0]
    lines = [line.rstrip() for line in text.splitlines() if not line.startswith("#")]
    while lines and not lines[0]:
        lines.pop(0)
    if not lines:
        return ["the message is empty"]
    subject, *rest = lines
    if subject.startswith(BY_GIT):
        return []
    found = []
    if len(subject) > MAX_SUBJECT:
        found.append(
            f"the subject has {len(subject)} characters, {MAX_SUBJECT} at most are readable in a log"
        )
    if SCOPED.match(subject) is None:
        found.append("the subject does not begin with its scope, as in 'router: ...'")
    if subject.endswith("."):
        found.append("the subject ends in a full stop")
    if rest and rest[0]:
        found.append("the second line is not empty")
    if not any(rest):
        found.append("there is no body: say why the change is made")
    return found


def commits_of(revisions: str) -> dict[str, str]:
    """The messages of a range by abbreviated commit, oldest first. Raises CalledProcessError."""
    form = "%h%x00%B%x01"
    command = ["git", "log", "--no-merges", "--reverse", f"--format={form}", revisions]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    entries = (entry.lstrip("\n").partition("\0") for entry in output.split("\x01") if entry.strip())
    return {commit: message for commit, _, message in entries}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", type=Path, help="a file with one message")
    what.add_argument("--range", metavar="A..B", help="commits, as git log takes them")
    args = parser.parse_args(arguments)
    messages = commits_of(args.range) if args.range else {str(args.file): args.file.read_text()}
    failed = False
    for name, message in messages.items():
        for problem in problems(message):
            failed = True
            first = message.strip().partition("\n")[0]
            print(f"{name}: {problem}: {first[:MAX_SUBJECT]!r}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
