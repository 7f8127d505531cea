"""Samplers: from a velocity field and a plan to a forest of latents."""
