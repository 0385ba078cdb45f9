"""Servers whose rows always have drafts, and their answers beside those of a server without."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.e2e.completions import at_once
from tests.e2e.survival.killed_answers import CHAT, Asked, stream
from tests.support.servers.server import Server, running_server

NGRAM = '{"method": "ngram", "num_speculative_tokens": %d, "prompt_lookup_min": 2, "prompt_lookup_max": 5}'
FEW = {
    str(token): 100 for token in (300, 310, 320)
}  # a text of few tokens repeats itself, so that there are drafts
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
COMPLETIONS = "/v1/completions"


@contextmanager
def always_drafting(model: Path, *flags: str) -> Iterator[Server]:
    """A server of which every row has as many drafts as there may be, whatever pays on this machine now."""
    change = patch.dict(os.environ, TESTS_CHANGE="tests.support.worker.always_drafts")
    with change, running_server(model, *flags) as running:
        yield running


@contextmanager
def drafting_server(model: Path, number: int) -> Iterator[Server]:
    """A server of which every row has up to `number` drafts by look-up."""
    flags = "--speculative-config", NGRAM % number, "--max-num-batched-tokens", "512"
    with always_drafting(model, *flags) as running:
        yield running


def same(plain: Server, drafting: Server, asked: list[Asked], *, accepted: int = 1) -> list[Any]:
    """Asks each alone of one server and all at once of the other, streamed and whole. Returns the whole answers.
    accepted: right drafts, at least."""
    before = drafting.metrics()[ACCEPTED]
    expected = [stream(plain, *one)[0] for one in asked]
    assert at_once(lambda one: stream(drafting, *one)[0], asked) == expected
    found = [drafting.post(path, body | {"ignore_eos": path != CHAT}, 120.0) for path, body in asked]
    assert drafting.metrics()[ACCEPTED] >= before + accepted
    for (path, body), whole, (choices, counts) in zip(asked, found, expected, strict=True):
        assert whole["usage"]["completion_tokens"] == counts["completion_tokens"]
        if path == COMPLETIONS and not body.get("echo"):
            assert [one["text"] for one in whole["choices"]] == [streamed[0] for streamed in choices]
    return found
