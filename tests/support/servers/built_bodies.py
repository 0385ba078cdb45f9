"""Builds the validators of all request bodies at import: for a process that forks servers, each of which would build
them at its first requests."""

from __future__ import annotations

from moeserve.httpserver.app import APIS

for _api in APIS:
    for _body in _api.bodies:
        _body.model_rebuild()
