"""A worker on another machine: the line of router and worker (`messages/rpc.py`) over TCP, with mutual TLS.

    router ──Unix── link ══TLS over TCP══ gate ──Unix── worker
    the server's machine                  the worker's machine

The link stands in the server for its worker process, and the gate, within `moeserve worker`, in front of a worker that
is no different from a local one. Both pass rpyc's bytes on as they are, each plan and each result as one message, and
say every half second that they are there. Router and worker see a Unix socket.
"""
