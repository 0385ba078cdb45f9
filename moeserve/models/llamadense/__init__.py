"""Llama, Mistral and Mixtral."""
