"""N-gram embeddings: rows of a large table, chosen by hashes of the last tokens, that are added to the residual."""
