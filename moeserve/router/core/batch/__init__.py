"""Waiting and running requests: the queue, admission, the running batch, and beam searches over several requests."""
