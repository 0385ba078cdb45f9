"""The engine's client: requests to the router, streams of text back."""
