"""From a model's file to weights in memory: nothing here names an architecture.

cpu_weights.py, gpu_weights.py        what a decoder needs, on the CPU and on a GPU
cpu_loader.py     into the CPU pool's panels, or in place
gpu_loader.py     into planes on a GPU, through upload.py
ram_experts.py    the experts that a GPU's decoder leaves in RAM
expert_stream.py  the same on their way through the GPU, for steps of many tokens
"""
