"""Speculative decoding: drafters, and the verification of their tokens."""
