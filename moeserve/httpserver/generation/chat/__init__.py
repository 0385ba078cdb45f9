"""Conversations: messages, tools and reasoning, to a prompt and from an answer."""
