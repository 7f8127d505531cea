"""Objectives: what is learned from a rollout. Each declares what it needs, and computes a loss."""
