"""Piecewise attention: two score functions, chosen by the distance of query and key, under one softmax."""
