"""Architecture falcon-h1."""
