"""Waiting and running requests: queue, admission, binding, beam searches of several requests."""
