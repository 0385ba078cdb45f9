"""A client's request in terms that all APIs share."""
