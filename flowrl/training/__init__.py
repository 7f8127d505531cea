"""The loop, and what surrounds it: run folder, checkpoints, evaluation, metrics, trackers."""
