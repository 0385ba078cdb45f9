"""A whole architecture outside the package: what adding one takes, and what each of its parts is tested with.

family.py      how its files are read: all that the engines, placement and loading need
model_file.py  a tiny GGUF of it, with random weights
reference.py   what it computes, in plain torch
"""
