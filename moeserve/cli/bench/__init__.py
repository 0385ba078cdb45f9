"""`moeserve bench`: measures the engine alone, its steps, or any server from outside. Further programs: benchmarks/."""
