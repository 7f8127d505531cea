"""Backbones: how each family of pipelines encodes text, predicts a velocity and decodes."""
