"""Ministral 3 and Devstral 2."""
