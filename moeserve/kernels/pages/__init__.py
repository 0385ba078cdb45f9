"""Copies pages of KV between a cache's slots and contiguous memory.

A page holds the rows of its slots, tensor by tensor: the slots' rows of the first tensor, then their rows of the next.
"""
