"""Lists of prompts to train on and held-out ones: what `flowrl prompts` writes."""
