"""Rewards at work: what a reward is, how it is called, combined, served and checked."""
