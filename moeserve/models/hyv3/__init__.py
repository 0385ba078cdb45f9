"""Hunyuan 3."""
