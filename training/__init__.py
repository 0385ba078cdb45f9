"""How the packaged model was made: its text, tokenizer, training, export and evaluation. See training/README.md."""
