"""KV slots, the prefix tree, windows and recurrent states: who owns each slot."""
