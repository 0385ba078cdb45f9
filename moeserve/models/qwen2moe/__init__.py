"""Qwen2-MoE and Qwen1.5-MoE."""
