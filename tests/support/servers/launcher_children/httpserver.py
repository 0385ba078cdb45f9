"""Stands in for the httpserver."""

import os

from tests.support.servers.launcher_children.behaviour import run

if os.environ["LAUNCHER_TEST"] == "httpserver:bad import":
    import there_is_no_such_module  # type: ignore[import-not-found]  # noqa: F401

run("httpserver")
