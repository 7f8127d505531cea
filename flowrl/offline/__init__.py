"""Groups of scored images on disk: the format, its writer, and the source that reads rollouts."""
