"""Records of steps on request: routing traces and debug dumps."""
