"""The forms of a plan in the worker: its orders, its launched step, and the plans received ahead of their steps."""
