"""`moeserve compare-dumps`: where two debug dumps of a model first differ. Nothing here knows torch."""
