"""Where a reward runs: in this process, in a pool of processes, or on servers."""
