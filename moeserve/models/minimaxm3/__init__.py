"""MiniMax-M3."""
