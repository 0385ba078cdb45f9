"""LoRA adapters: loading them, their memory, and the adapters that the engine holds."""
