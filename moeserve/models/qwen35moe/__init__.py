"""Qwen3.5-MoE and Qwen3.6-MoE."""
