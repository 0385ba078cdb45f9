"""The architecture qwen4exp: Qwen3.8-Flash-Next."""
