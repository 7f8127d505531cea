"""Questions to a vision-language model on a server, and what its answers are worth."""
