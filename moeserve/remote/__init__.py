"""A worker on another machine: the connection between router and worker (`messages/rpc.py`) over TCP, with mutual TLS.

    router ──Unix── link ══TLS over TCP══ gate ──Unix── worker
    the server's machine                  the worker's machine

The link runs in the server where a local worker process would run. The gate is a part of `moeserve worker`, and is in
front of a worker like any local one. Both forward rpyc's bytes unchanged, each plan and each result as one message, and
send a heartbeat every half second. Router and worker see a Unix socket.
"""
