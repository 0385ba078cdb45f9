"""Architecture lfm2moe."""
