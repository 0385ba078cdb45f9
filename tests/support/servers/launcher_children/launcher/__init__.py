"""As in moeserve: the zygote."""
