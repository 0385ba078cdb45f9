"""`moeserve pull`, `list`, `show` and `rm`: models of the Hugging Face Hub by the names that `--model` takes."""
