"""Where a reward runs: in this process or on servers."""
