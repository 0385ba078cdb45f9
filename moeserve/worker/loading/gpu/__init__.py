"""Loading for one GPU: what goes where, weights, buffers, and the steps before the first request."""
