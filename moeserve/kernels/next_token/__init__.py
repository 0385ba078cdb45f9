"""The model's next-token block on a GPU: its inputs, and the choice of each draft."""
