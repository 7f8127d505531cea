"""Measure LoRAs and pipelines side by side: leaderboard, benchmarks, calibration of detectors."""
