"""Hunyuan-A13B."""
