"""`python -m flowrl` is the command line."""

from flowrl.cli import main

if __name__ == "__main__":
    main()
