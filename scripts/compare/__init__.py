"""Methods side by side, over seeds: runs, data and pages of the gallery. See `__main__`."""
