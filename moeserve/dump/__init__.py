"""A model's inside, step by step, on disk (`--debug-dump`), and the comparison of two such dumps
(`moeserve compare-dumps`). docs/debugging.md describes the files; nothing here knows torch."""
