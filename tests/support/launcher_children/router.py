"""Stands in for the router."""

from tests.support.launcher_children.behaviour import run

run("router")
