"""The engine that computes on the C++ pool."""
