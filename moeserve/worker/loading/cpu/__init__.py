"""Loading for the CPU engine: pool, threads, and weights in RAM."""
