"""ERNIE 4.5 with experts."""
