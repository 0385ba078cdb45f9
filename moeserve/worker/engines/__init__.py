"""What computes a step's rows, by device. `engine.py` says what every engine does; the runner knows nothing else."""
