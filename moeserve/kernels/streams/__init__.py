"""Hyper-connections: a residual of several streams that blocks read through a gate and write to by learned weights."""
