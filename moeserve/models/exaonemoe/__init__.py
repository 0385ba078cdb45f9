"""EXAONE-MoE."""
