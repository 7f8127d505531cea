"""From the configuration to objects; the only package that knows both."""
