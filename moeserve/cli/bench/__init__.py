"""`moeserve bench`: measures the engine without a server, the engine's steps, or any server through its API.
benchmarks/ has further programs."""
