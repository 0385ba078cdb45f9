"""LFM2's short convolution: a gated causal convolution of a few tokens, in the place of attention."""
