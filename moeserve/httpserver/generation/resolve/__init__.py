"""What a request comes to for the served model, and the messages to the engine that it is then frozen into."""
