"""Building blocks of decoders, shared by all model families. A `ModelShape` tells which features a model has.

rope.py    angles of rotary positions (RoPE)
cpu/       on the C++ pool; decoder.py shows the whole network
gpu/       on a GPU; experts in RAM are computed by the pool or streamed
"""
