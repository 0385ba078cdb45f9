"""Qwen3-Next."""
