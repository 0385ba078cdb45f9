"""Low-rank adapters (LoRA, arXiv:2106.09685) beside a product: out += B A x, with another A and B for each row."""
