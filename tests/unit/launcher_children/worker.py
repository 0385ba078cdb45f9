"""Stands in for the worker."""

from tests.unit.launcher_children.behaviour import run

run("worker")
