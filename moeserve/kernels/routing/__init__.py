"""The router's choice of experts. In C++: `CpuStream.route`. Imports nothing, so that `options` can be imported
without torch."""
