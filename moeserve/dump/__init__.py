"""A model's inside, step by step, on disk (`--debug-dump`), and the comparison of two such dumps
(`moeserve compare-dumps`). docs/reference/debug-dumps.md describes the files; nothing here knows torch."""
