"""Measuring: the engine alone, its steps, and any server from outside. Other programs beside it are in benchmarks/."""
