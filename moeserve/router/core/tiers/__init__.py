"""The prefix cache's tiers behind the KV pool, in RAM and on disk: their contents, loads and writes."""
