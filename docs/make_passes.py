"""Write docs/passes.md: what each pass promises, taken from the passes themselves.

python docs/make_passes.py            writes the page
python docs/make_passes.py --check    fails when the page is out of date
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

from autopar.pass_manager import Pass
from autopar.passes import GLOBAL_PASSES, PLACEMENT_PASSES, STEP_PASSES

GROUPS = {"global": GLOBAL_PASSES, "typed": PLACEMENT_PASSES, "step": STEP_PASSES}
PAGE = Path(__file__).resolve().parent / "passes.md"

HEAD = """# Passes

Made by `make docs` from `passes/`; change the docstrings there. In the order in which they run.

| pass | graph | requires | ensures |
|---|---|---|---|
"""


def render(groups: Mapping[str, Iterable[Pass]]) -> str:
    """The page: a table of the facts that hold before and after each pass, then each module's docstring.

    ``groups``: what a group of passes works on -> its passes.
    """
    kinds = [type(p) for passes in groups.values() for p in passes]
    rows = [
        f"| [{p.name}](#{p.name}) | {graph} | {_facts(p.requires)} | {_facts(p.ensures)} |"
        for graph, passes in groups.items()
        for p in passes
    ]
    return HEAD + "\n".join(rows) + "\n" + "".join(_part(p) for p in kinds)


def _facts(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _part(kind: type[Pass]) -> str:
    module = sys.modules[kind.__module__]
    title, _, rest = inspect.getdoc(module).partition("\n")  # type: ignore[union-attr]
    summary = title.partition(": ")[2] or title
    body = f"\n```text\n{rest.strip()}\n```\n" if rest.strip() else ""
    return f"\n## {kind.name}\n\n{summary[:1].upper()}{summary[1:]}\n{body}"


def main(arguments: list[str]) -> int:
    """Write or check the page; returns the exit status."""
    text = render(GROUPS)
    if "--check" in arguments:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != text:
            print("docs: docs/passes.md is out of date; run make docs")
        return int(current != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
