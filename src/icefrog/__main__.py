"""``python -m icefrog``."""

from icefrog.cli import main

if __name__ == "__main__":
    main()
