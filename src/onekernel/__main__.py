"""`python -m onekernel` is the `onekernel` command, which begins here too."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command line and return its exit code; Ctrl-C is quiet from here on, also while Python still imports."""
    try:
        from onekernel.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
