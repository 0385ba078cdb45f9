"""The zygote: the process from which routers and detokenizers are forked.

Python's imports and reading a vocabulary of 150,000 tokens take seconds, which a restart after a crash must not cost
again. The zygote does both once, then only forks; a fork becomes the router or the detokenizer and shares this
memory copy-on-write.

`forking.py` is the forking side, `client.py` the launcher's side.
"""
