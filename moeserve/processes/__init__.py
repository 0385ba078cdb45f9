"""The parts that every process of the server shares: start and end, limits, logs, traces, sockets, sandboxes."""
