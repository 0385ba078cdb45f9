"""Ling 2 and Ring 2 (Bailing MoE V2), and Sarvam."""
