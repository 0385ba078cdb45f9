"""Matrix times activations. In C++: `CpuStream.linear`; csrc/arch/shared/gemm.inl for the arithmetic. No torch."""
