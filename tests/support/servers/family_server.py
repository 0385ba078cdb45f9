"""A fixture: httpserver with the chat template and vocabulary of a family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.models.family_vocabulary import write_family_model
from tests.support.servers.http_harness import HttpServer, http_server


def serving(family: str) -> Any:
    """Returns a fixture of a module: a server of the family's tiny model (`family_templates.py` has the names)."""

    @pytest.fixture(scope="module")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpServer]:
        model = write_family_model(family, tmp_path_factory.mktemp(family) / "model.gguf")
        with http_server(model=str(model), context=2048) as running:
            yield running

    return server
