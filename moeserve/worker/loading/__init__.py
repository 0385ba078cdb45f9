"""Loads a runner, which executes plans, from a configuration: on a CPU, on one GPU, or on several."""
