"""Scheduling policies: order, pace, fairness, preemption and back-pressure."""
