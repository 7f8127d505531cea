"""Rollouts in few bits: which products a device has, which layers use them, kept up to date."""
