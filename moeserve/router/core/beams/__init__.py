"""Beam search: the search itself, and the slots of its beams."""
