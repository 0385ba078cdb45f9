"""Stands in for the detokenizer."""

from tests.support.servers.launcher_children.behaviour import run

run("detokenizer")
