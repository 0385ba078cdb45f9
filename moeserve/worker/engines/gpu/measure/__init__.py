"""What is measured of an engine: how fast steps are, and what they read."""
