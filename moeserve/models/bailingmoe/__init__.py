"""Ling 1."""
