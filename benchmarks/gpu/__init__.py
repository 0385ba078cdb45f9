"""The parts of benchmarks/gpu_kernels.py."""
