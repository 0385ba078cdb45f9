"""`moeserve launch`: starts an agent that uses this server, by means of its environment and configuration."""
