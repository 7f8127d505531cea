"""Prompt lists made from templates: GenEval tasks and words to render."""
