"""How a model is divided among several GPUs: the share of each, and its tensors from a file."""
