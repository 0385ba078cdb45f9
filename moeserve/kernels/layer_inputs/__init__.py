"""Per-layer embeddings: an input of each layer for each token, beside the residual."""
