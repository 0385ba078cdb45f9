"""Names of models on the hub: org/repo, org/repo:Q4_K_M, org/repo:file.gguf; after the repository, @revision may
follow."""

from __future__ import annotations

import re
from typing import NamedTuple

from .errors import HubError

_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(@(?P<revision>\w[\w./-]{0,254}))?(:(?P<wanted>[^:\s]+))?",
    re.ASCII,
)

# As browsers show a model, and as Ollama names it: hf.co/org/repo:Q4_K_M.
_ADDRESS = re.compile(
    r"(https?://)?(www\.)?(huggingface\.co|hf\.co)/(?P<repo>[\w.-]+/[\w.-]+)"
    r"(/(blob|resolve)/main/(?P<file>[^?#]+)|:(?P<tag>[^/?#]+))?.*",
    re.ASCII,
)


class HubName(NamedTuple):
    """A parsed name. `wanted`: a file of the repository if it ends with .gguf, else the tag of a quantisation."""

    repo: str  # org/repo
    wanted: str | None
    revision: str | None = None  # a branch, a tag or a commit; None: the default branch

    @property
    def wants_file(self) -> bool:
        return self.wanted is not None and self.wanted.endswith(".gguf")

    def __str__(self) -> str:
        pin = "" if self.revision is None else f"@{self.revision}"
        wanted = "" if self.wanted is None else f":{self.wanted}"
        return f"{self.repo}{pin}{wanted}"


def parse_name(text: str) -> HubName | None:
    """Returns the parts of a name; None for a text that can only be a path: files/model.gguf, ./a/b, /a/b."""
    match = _NAME.fullmatch(text)
    if match is None or (match["wanted"] is None and text.endswith(".gguf")):
        return None
    return HubName(match["repo"], match["wanted"], match["revision"])


def name_of(text: str) -> HubName | None:
    """Does the same as `parse_name`, but raises HubError for an address, with the name of the model at the address."""
    name = parse_name(text)
    if name is not None:
        return name
    if (match := _ADDRESS.fullmatch(text)) is not None:
        wanted = match["file"] or match["tag"]
        meant = match["repo"] if wanted is None else f"{match['repo']}:{wanted}"
        raise HubError(f"{text} is an address; a model of the Hub is named without it: {meant}")
    if "://" in text:
        raise HubError(f"{text} is an address; name a path, or a model of the Hub as org/repo")
    return None
