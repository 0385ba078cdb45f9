"""Stands in for the detokenizer."""

from tests.support.launcher_children.behaviour import run

run("detokenizer")
