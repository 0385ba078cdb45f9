"""Gemma 2."""
