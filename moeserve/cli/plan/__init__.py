"""`moeserve plan`: where everything would go, what fits and how fast it would be, from the file's header alone.

memory.py    bytes by device, tokens of KV that fit
machine.py   what this machine can do, measured with the engine's own kernels
speed.py     from both to tokens a second
report.py    text and JSON
"""
