"""Stands in for the worker."""

from tests.support.launcher_children.behaviour import run

run("worker")
