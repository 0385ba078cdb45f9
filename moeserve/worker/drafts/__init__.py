"""Several tokens of a request in one step: who drafts them, and which are kept."""
