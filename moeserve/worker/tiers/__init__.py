"""Moves KV pages and recurrent states between the pool, RAM and disk."""
