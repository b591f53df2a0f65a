"""`python -m kvik`: the command `kvik`, where no folder of commands is on PATH."""

from kvik.cli import main

if __name__ == "__main__":
    main()
