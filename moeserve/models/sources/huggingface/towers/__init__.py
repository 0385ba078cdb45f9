"""The names that folders in Hugging Face's layout have for the contents of an `mmproj` file, one module for each kind
of tower."""
