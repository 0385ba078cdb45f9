"""Loads weights from a model's file into memory. Nothing here names an architecture.

cpu_weights.py, gpu_weights.py        the weights that a decoder needs, on the CPU and on a GPU
gpu_inputs.py     the weights by which blocks on a GPU read the residual
cpu_loader.py     packs into the CPU pool's panels, or uses the file in place
gpu_loader.py     uploads as planes to a GPU, through upload.py
ram_experts.py    loads the experts that a GPU's decoder leaves in RAM
expert_stream.py  streams RAM experts through the GPU, in steps with many tokens
"""
