"""Beam search: its rows, its candidates, and its requests."""
