"""Records that steps write on request: routing traces and debug dumps."""
