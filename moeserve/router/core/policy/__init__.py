"""Who runs next, who waits, who gives way, and at what pace."""
