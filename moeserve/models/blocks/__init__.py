"""Building blocks of decoders, shared by all model families. A `ModelShape` tells which features a model has.

rope.py    angles of rotary positions (RoPE)
cpu/       blocks on the C++ pool; decoder.py shows the whole network
gpu/       blocks on a GPU; the pool computes experts in RAM, or they are streamed
"""
