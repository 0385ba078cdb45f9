"""Gated DeltaNet, the mixer of recurrent layers. In C++: `CpuStream.delta_net`. Imports nothing, so that `heads` can
be imported without torch."""
