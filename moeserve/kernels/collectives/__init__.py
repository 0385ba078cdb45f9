"""Sums over the GPUs that compute one model together (all-reduce), in several ways; the fastest per size is
measured.

all_reduce.py   the interface, and torch.distributed's implementation
push.py         small messages: each GPU writes into the others' memory, one launch without a barrier
peer_memory.py  PyTorch's kernels over peer memory
fastest.py      chooses the fastest by measurement
stage_link.py   not a sum: sends rows to the next GPU in pipeline parallelism
"""
