"""MiMo-V2."""
