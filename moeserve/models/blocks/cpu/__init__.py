"""Decoders on the C++ pool."""
