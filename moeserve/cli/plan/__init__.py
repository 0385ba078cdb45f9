"""`moeserve plan`: predicts where each part of a model would be placed, what fits and how fast it would be, from the
file's header alone.

memory.py    bytes by device, tokens of KV that fit
machine.py   what this machine can do, measured with the engine's own kernels
speed.py     predicts tokens per second from both
report.py    text and JSON
"""
