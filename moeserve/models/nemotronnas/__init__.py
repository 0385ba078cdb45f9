"""Architecture deci."""
