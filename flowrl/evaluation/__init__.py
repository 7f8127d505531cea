"""Measure LoRAs and pipelines side by side: leaderboards and benchmarks."""
