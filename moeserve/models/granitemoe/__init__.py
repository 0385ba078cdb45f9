"""Granite 3 with experts."""
