"""A server for Mixture-of-Experts models whose experts do not fit on the GPU.

`__version__` is declared here alone: pyproject.toml reads it, and a test compares CHANGELOG.md with it."""

__version__ = "0.1.0"
