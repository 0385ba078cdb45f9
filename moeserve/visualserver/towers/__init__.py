"""The networks that read pictures, one module each."""
