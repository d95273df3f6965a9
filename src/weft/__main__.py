"""``python -m weft``: the shell, also where the command ``weft`` is not on the path."""

from weft.cli.main import main

if __name__ == "__main__":
    main()
