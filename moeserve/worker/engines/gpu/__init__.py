"""The engine that computes on a GPU, with the CPU pool for experts in RAM."""
