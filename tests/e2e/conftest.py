"""Triton's interpreter where there is no GPU: set up before any of these tests imports triton. Then the servers that
several files of tests share."""

from __future__ import annotations

import tests.kernels.triton_device  # noqa: F401  # isort: skip  (first: whoever imports triton before it gets no interpreter)

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.drafts.drafted_answers import drafting_server
from tests.support.servers.server import Server, running_server


@pytest.fixture(scope="session")
def demonstration() -> Iterator[Server]:
    """The model that ships with moeserve, without flags, for tests that leave the server as it was."""
    with running_server(None) as running:
        yield running


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[Server]:
    with running_server(tiny_model, "--max-num-batched-tokens", "512") as running:
        yield running


@pytest.fixture(scope="module")
def drafting(tiny_model: Path) -> Iterator[Server]:
    with drafting_server(tiny_model, 4) as running:
        yield running
