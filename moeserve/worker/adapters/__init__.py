"""LoRA adapters: their memory, loading them, and which ones are resident."""
