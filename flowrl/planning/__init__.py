"""How much memory a run takes, from shapes alone: nothing is loaded, downloaded or allocated."""
