"""Stands in for the router."""

from tests.unit.launcher_children.behaviour import run

run("router")
