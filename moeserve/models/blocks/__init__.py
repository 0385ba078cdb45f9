"""The parts of decoders that families share. A `ModelShape` says which of their features a model has.

rope.py    the angles of rotary positions
cpu/       on the C++ pool        decoder.py reads as the network
gpu/       on a GPU, with experts in RAM computed by the pool or streamed
"""
