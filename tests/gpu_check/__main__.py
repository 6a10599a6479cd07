"""Run the checks, print the table, write the JSON."""

from __future__ import annotations

from tests.gpu_check.command import main

if __name__ == "__main__":
    raise SystemExit(main())
