"""The engine that computes on a GPU, with the CPU pool beside it for experts in RAM."""
