"""The arena: methods compared on worlds that nobody tuned on."""
