"""From a configuration to a runner that executes plans: on a CPU, on one GPU, on several."""
