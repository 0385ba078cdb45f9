"""Loading for one GPU: placement, weights, buffers, and the steps before the first request."""
