"""The architecture deepseek4: DeepSeek-V4 and V4-Flash."""
