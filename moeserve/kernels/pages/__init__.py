"""Pages of KV between a cache's slots and memory where they lie as a whole.

A page is the rows of its slots, tensor by tensor: the slots' rows of the first tensor one after another, then those of
the next.
"""
