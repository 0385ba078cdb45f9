"""A step from its plan to its result: its rows, the plans in flight, and the resulting messages."""
