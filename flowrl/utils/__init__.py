"""Helpers that know nothing of flowrl: files, processes, progress, images, plots, templates."""
