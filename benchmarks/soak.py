"""A server under load and faults for a long time: nothing may be lost but what a fault names.

    python -m benchmarks.soak --faults 10000 [--minutes 20] [--requests 6000] [--seed 1] [--summary soak.json]
    python -m benchmarks.soak --report soak-1.json soak-2.json ...      # adds up the summaries of several runs

`tests/support/measuring/soak/` has the faults, what each of them may cost, and the other options.
"""

from __future__ import annotations

import sys

from tests.support.measuring.soak import report, run

if __name__ == "__main__":
    arguments = sys.argv[1:]
    sys.exit(report.main(arguments[1:]) if arguments[:1] == ["--report"] else run.main(arguments))
