"""Constrained answers: grammars, reasoning budgets and banned sequences, as masks of allowed tokens."""
