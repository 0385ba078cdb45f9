"""Where models come from: files in two formats, in one language.

source.py      what an opened model is, whatever its format
gguf/          GGUF files, whose keys, names and types are the language
huggingface/   folders of safetensors, translated into it
"""
