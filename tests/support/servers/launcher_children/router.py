"""Stands in for the router."""

from tests.support.servers.launcher_children.behaviour import run

run("router")
