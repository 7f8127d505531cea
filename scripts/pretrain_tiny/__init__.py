"""Pretraining of the built-in tiny pipelines: `python -m scripts.pretrain_tiny --help`."""
