"""Runs the router's scheduler under a workload in virtual time; a model of step times replaces the worker."""
