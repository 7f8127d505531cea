"""Comparisons of methods over seeds on the tiny world, from runs to a page with intervals."""
