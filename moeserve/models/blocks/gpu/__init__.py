"""Decoders on a GPU."""
