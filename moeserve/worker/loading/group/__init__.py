"""Loading for several GPUs: the leader, and a follower process for each further GPU."""
