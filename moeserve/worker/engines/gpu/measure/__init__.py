"""Measures a GPU engine at start-up: durations of steps and expert-streaming calibration."""
