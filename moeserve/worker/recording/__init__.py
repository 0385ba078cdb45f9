"""What steps write down when asked: routing traces and debug dumps."""
