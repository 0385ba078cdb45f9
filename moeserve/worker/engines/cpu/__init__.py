"""The engine that computes on the C++ thread pool."""
