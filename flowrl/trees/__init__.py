"""Rollout plans as pure data: what branches, what has noise, what is trained. No torch here."""
