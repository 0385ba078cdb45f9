"""Conversations: messages, tools and reasoning are made into a prompt, and read from an answer."""
