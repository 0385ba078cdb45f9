"""`moeserve compare-dumps`: where two debug dumps of a model first differ. This package does not import torch."""
