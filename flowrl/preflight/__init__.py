"""Do rewards work? Asked before anything learns from them, and by `flowrl reward-check`."""
