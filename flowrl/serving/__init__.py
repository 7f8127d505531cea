"""Rewards over HTTP: what `flowrl reward-serve` runs."""
