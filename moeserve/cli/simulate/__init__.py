"""Runs the router's scheduler under a workload in virtual time, with a model of step times in place of a worker."""
