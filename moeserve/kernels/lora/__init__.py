"""Low-rank adapters (LoRA, arXiv:2106.09685) beside a product: out += B A x, with A and B of each row's own adapter."""
