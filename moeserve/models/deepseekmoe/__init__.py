"""DeepSeekMoE."""
