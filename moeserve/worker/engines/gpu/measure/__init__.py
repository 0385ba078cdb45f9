"""Measurements of an engine: the durations of steps, and the bytes that they read."""
