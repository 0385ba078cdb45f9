"""Ownership of KV slots, window slots and recurrent-state slots, and the prefix tree."""
