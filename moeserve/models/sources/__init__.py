"""Model files in two formats, read through one interface.

source.py      the interface of an opened model
gguf/          GGUF files, whose keys, tensor names and types the interface uses
huggingface/   folders of safetensors, translated to GGUF's keys and names
"""
