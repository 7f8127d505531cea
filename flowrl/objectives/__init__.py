"""One file an objective, its loss function and its class together."""
