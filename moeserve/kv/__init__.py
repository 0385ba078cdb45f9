"""The KV cache's layout, size and tensors. The router assigns the slots; this package stores the contents of the slots.

layout.py          dtype and bytes of a token's keys and values; imports no torch
capacity.py        how many tokens fit, from the flags and the free memory
state_capacity.py  how many slots of recurrent state fit, for running sequences and for snapshots
cache.py           the KV tensors, and the views of one layer that attention reads
states.py          the tensors of recurrent states: one slot per sequence instead of one per token
cache_pages.py     copies between slots of the cache and pages of bytes in RAM
disk/              the prefix cache's disk tier: files of pages

A new KV dtype is added in this package and in the loads of the attention kernels.
"""
