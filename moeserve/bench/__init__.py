"""Measuring: the engine alone here; the rivals beside us are in benchmarks/."""
