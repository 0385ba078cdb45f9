"""The routed experts of a layer. In C++: `CpuStream.experts`, which reads each expert's weights once per step.
Imports nothing, so that `options` can be imported without torch."""
