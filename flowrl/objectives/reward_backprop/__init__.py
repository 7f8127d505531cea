"""Objectives that follow the gradient of a differentiable reward."""
