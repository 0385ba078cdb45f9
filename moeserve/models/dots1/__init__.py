"""dots.llm1."""
