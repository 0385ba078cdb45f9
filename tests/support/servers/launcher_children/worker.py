"""Stands in for the worker."""

from tests.support.servers.launcher_children.behaviour import run

run("worker")
