"""How folders in Hugging Face's layout name what an `mmproj` file has: one module for each kind of tower."""
