"""Operations that the layers of a vision tower compute between their products, on a GPU."""

from moeserve.kernels.tower import reference

__all__ = ["reference"]
