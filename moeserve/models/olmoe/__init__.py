"""OLMoE."""
