"""The embedded default: a small world of shapes and words, and the pipelines pretrained on it."""
