"""Stand-ins for the server's processes: real sockets, messages and signals, no model.

LAUNCHER_TEST=<process>:<behaviour> makes one of them misbehave.
"""
