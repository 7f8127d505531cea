"""How rewards are asked: in this process, in a pool of others, or on a server."""
