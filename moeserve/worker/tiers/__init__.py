"""KV pages and recurrent states on their way between the pool, RAM and disk."""
