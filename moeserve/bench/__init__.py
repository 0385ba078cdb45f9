"""Measuring: the engine alone, its steps, and any server from outside. The rivals beside us are in benchmarks/."""
