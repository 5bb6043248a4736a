"""``python -m wisparse``: the same as the ``wisparse`` command."""

from .cli import main

if __name__ == "__main__":
    main()
