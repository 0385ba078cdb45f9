"""`moeserve launch`: an agent, told of our server by its environment and its configuration."""
