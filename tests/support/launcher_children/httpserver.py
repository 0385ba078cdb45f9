"""Stands in for the httpserver."""

from tests.support.launcher_children.behaviour import run

run("httpserver")
