"""LFM2's short convolution: a gated causal convolution over a few tokens, which replaces attention in some layers."""
