"""``python -m autopar``: the command line, see `autopar.cli.main`."""

from __future__ import annotations

import sys

from autopar.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
