"""Stands in for the detokenizer."""

from tests.unit.launcher_children.behaviour import run

run("detokenizer")
