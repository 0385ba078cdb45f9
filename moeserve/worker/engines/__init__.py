"""The engines that compute a step's rows, one for each device. `engine.py` says what every engine does; the runner
knows nothing else."""
