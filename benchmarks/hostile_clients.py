"""Clients without a key that do what they can to hold up a server, and what its other clients notice.

    python -m benchmarks.hostile_clients [--attack pipelined-gets] [--connections 80] [--seconds 8] [--checkout DIR]

`tests/support/hostile_clients.py` has the attacks.
"""

from __future__ import annotations

from tests.support.hostile_clients import main

if __name__ == "__main__":
    main()
