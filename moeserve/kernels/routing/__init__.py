"""Choosing a token's experts. In C++: `CpuStream.route`. Imports nothing, so that `options` comes without torch."""
