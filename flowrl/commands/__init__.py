"""The commands of the `flowrl` program: each reads its arguments, builds, calls and prints."""
