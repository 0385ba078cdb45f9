"""The commands: serve, worker, plan, bench, simulate, compare-dumps, reload and completion."""
