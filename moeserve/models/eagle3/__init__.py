"""EAGLE-3 heads, which draft for another model."""
