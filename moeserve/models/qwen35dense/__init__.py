"""Qwen3.5, dense."""
