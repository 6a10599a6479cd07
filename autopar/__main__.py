"""``python -m autopar``: the command line, see `autopar.cli`."""

from __future__ import annotations

import sys

from autopar.cli import main

if __name__ == "__main__":
    sys.exit(main())
