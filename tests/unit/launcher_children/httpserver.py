"""Stands in for the httpserver."""

from tests.unit.launcher_children.behaviour import run

run("httpserver")
