"""A GPU step's parts: inputs, CUDA graphs, slot tables, completion."""
