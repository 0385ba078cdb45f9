"""The networks that read pictures, one module for each."""
