"""`moeserve doctor`: whether this machine can serve, what is wrong with it, and the remedy."""
