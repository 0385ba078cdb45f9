"""Several GPUs of one host as one worker, with one process per GPU.

`leader.py` runs in the worker's process and drives the first GPU. `follower.py` is the process of each further GPU,
which runs the same steps on its share of the model. `ranks.py` is common to both.
"""
