"""Loading for the CPU: the pool, its threads, the weights in RAM."""
