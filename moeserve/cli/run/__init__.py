"""`moeserve run`: a chat in the terminal with the model of a server, or one question and its answer."""
