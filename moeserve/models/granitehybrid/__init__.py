"""Architecture granitehybrid."""
