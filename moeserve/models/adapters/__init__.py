"""LoRA adapters as files: this package reads them, checks them against a model's shape, and names them in the API. It
does not import torch.

An adapter is identified by its `key`, a digest of its files, so that two adapters with the same name, before and
after a restart, are never confused.
"""
