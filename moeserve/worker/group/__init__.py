"""Several GPUs of one host as one worker: a process for each.

`leader.py` is in the worker's process and drives the first GPU; `follower.py` is the process of each other one, which
runs the same steps on its share of the model. `ranks.py` is what both have in common.
"""
