"""The process that routers and detokenizers are forked from.

Python's imports, and a vocabulary of 150,000 tokens, take seconds, and a crash must not cost them again. So one process
has them and does nothing else: it forks, and the fork is the router or the detokenizer. It has what took long at once,
in memory that is shared copy-on-write.

`forking.py` is the fork, `moeserve/launcher/zygote/client.py` the launcher's side of it.
"""
