"""A step from its plan to its result: rows being planned, plans in flight, messages that result."""
