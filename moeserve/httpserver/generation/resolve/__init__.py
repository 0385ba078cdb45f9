"""A request resolved for the served model, and frozen into messages to the engine."""
