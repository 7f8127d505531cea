"""Prompts: the records and their sampler, the files they are read from, and lists made here."""
