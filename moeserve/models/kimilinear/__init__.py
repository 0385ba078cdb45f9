"""Kimi-Linear."""
