"""`python -m tpsgd` is the command line."""

from tpsgd.cli.app import main

if __name__ == "__main__":
    main()
