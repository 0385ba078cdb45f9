"""Qwen2, dense."""
