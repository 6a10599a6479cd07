"""Write docs/options.md: every option, as `autopar.options` declares it.

python docs/make_options.py            writes the page
python docs/make_options.py --check    fails when the page is out of date
"""

from __future__ import annotations

import sys
from pathlib import Path

import autopar.passes.attention
import autopar.runtime.schedules  # noqa: F401  (both fill tables that options name)
from autopar.options import DECLARED, DeclaredOption

PAGE = Path(__file__).resolve().parent / "options.md"
HEAD = """# Options

Made by `make docs` from `autopar/options.py`; change the declarations there. They are keyword arguments of
`autopar.parallelize` and `autopar.verify`, fields of `autopar.Options`, and arguments of `python -m autopar plan`,
`show` and `verify`. An option that a mesh does not use is refused: those that need an axis say which.

| option | on the command line | what it does | default | needs an axis |
|---|---|---|---|---|
"""


def row(option: DeclaredOption) -> str:
    """A line of the table."""
    names = f": {', '.join(f'`{name}`' for name in option.names)}" if list(option.names) else ""
    shown = f"{option.flag} {option.kind.shown}".strip().replace("|", "\\|")
    axes = " or ".join(option.axes)
    return f"| `{option.name}` | `{shown}` | {option.help}{names} | {option.shown_default} | {axes} |\n"


def main(arguments: list[str]) -> int:
    """Write or check the page; returns the exit status."""
    text = HEAD + "".join(map(row, DECLARED.values()))
    if "--check" in arguments:
        return int(not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
