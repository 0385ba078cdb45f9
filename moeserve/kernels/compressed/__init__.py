"""Compressed attention (DeepSeek-V4): to the tokens of a window, and to entries made of blocks of tokens."""
