"""Stands in for the httpserver."""

import importlib
import os

from tests.support.launcher_children.behaviour import run

if os.environ["LAUNCHER_TEST"] == "httpserver:bad import":
    importlib.import_module("there_is_no_such_module")

run("httpserver")
