"""What a client asks for, in terms that all APIs share."""
