"""LoRA adapters as files: reading, checking against a model's shape, and what the server calls them. No torch.

An adapter is found by its `key`, a digest of its files: two adapters with one name, before and after a restart, are
never taken for one another.
"""
