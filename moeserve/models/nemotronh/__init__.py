"""Architectures nemotron_h_moe and nemotron_h."""
