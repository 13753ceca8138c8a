"""`python -m onekernel` is the `onekernel` command."""

from __future__ import annotations

import sys

from onekernel.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
