"""Sums over the GPUs that compute one model together, in several ways, of which the fastest is measured for each size.

all_reduce.py   what a sum is, and torch.distributed's
push.py         small messages: each GPU writes into the others' memory, one launch without a barrier
peer_memory.py  PyTorch's kernels over peer memory
fastest.py      the choice
stage_link.py   no sum, but rows from one GPU to the next, where each has some of the layers
"""
