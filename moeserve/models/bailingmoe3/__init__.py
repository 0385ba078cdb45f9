"""Ling 3 and Ring 3 (Bailing MoE V3)."""
