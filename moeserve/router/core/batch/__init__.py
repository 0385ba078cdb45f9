"""The requests that wait and those that run: queue, admission, binding, beam searches of several requests."""
