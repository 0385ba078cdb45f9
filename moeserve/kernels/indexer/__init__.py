"""The indexer of sparse attention, which chooses the keys that a query attends to."""
