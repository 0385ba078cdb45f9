"""Mamba-2 (https://arxiv.org/abs/2405.21060), a state space model with one decay per head."""
