"""Write docs/passes.md: what each file of autopar/passes/ promises, taken from the files themselves.

python docs/make_passes.py            writes the page
python docs/make_passes.py --check    fails when the page is out of date
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType

from autopar import passes
from autopar.passes.pipelines import GLOBAL_PASSES, PLACEMENT_PASSES, STEP_PASSES
from autopar.rewrite.pass_manager import Pass

GROUPS = {"global": GLOBAL_PASSES, "typed": PLACEMENT_PASSES, "step": STEP_PASSES}
ROOMS = [f"autopar.passes.{name}" for name in ("partition", "autodiff", "stage", "step")]
PAGE = Path(__file__).resolve().parent / "passes.md"

# Steps of the compiler that make several graphs out of one, and so are no `Pass`: they run where `compile.py` says.
SPLITS = ("split_prologue", "split_statistics", "differentiate", "accumulate_gradients")

HEAD = """# Passes

Made by `make docs` from `autopar/passes/`; change the docstrings there. In the order in which they run.

| pass | graph | requires | ensures |
|---|---|---|---|
"""


def render(groups: Mapping[str, Iterable[Pass]], others: Sequence[ModuleType] = ()) -> str:
    """The page: a table of the facts that hold before and after each pass, then each module's docstring.

    ``groups``: what a group of passes works on -> its passes. ``others``: modules without a pass; they come before the
    last group when they split a graph in several, which is where they run, and at the end when they do not.
    """
    rows, parts = [], []
    splits = [m for m in others if _short(m) in SPLITS]
    for i, (graph, members) in enumerate(groups.items()):
        for module in splits if i and i == len(groups) - 1 else []:
            rows.append(f"| [{_short(module)}](#{_short(module)}) | makes several | | |")
            parts.append(_part(_short(module), module))
        for p in members:
            rows.append(f"| [{p.name}](#{p.name}) | {graph} | {_facts(p.requires)} | {_facts(p.ensures)} |")
            parts.append(_part(p.name, sys.modules[type(p).__module__]))
    parts += [_part(_short(m), m) for m in others if m not in splits]
    return HEAD + "\n".join(rows) + "\n" + "".join(parts)


def _facts(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _short(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _part(name: str, module: ModuleType) -> str:
    title, _, rest = (inspect.getdoc(module) or "").partition("\n")
    body = f"\n```text\n{rest.strip()}\n```\n" if rest.strip() else ""
    return f"\n## {name}\n\n{_summary(title)}\n{body}{_files(module)}"


def _summary(title: str) -> str:
    summary = title.partition(": ")[2] or title
    return f"{summary[:1].upper()}{summary[1:]}"


def _files(module: ModuleType) -> str:
    """What the files of a pass that is a folder are for."""
    names = [m.name for m in pkgutil.iter_modules(module.__path__)] if hasattr(module, "__path__") else []
    files = [importlib.import_module(f"{module.__name__}.{name}") for name in names]
    lines = [
        f"- `{_short(f)}.py`: {' '.join((inspect.getdoc(f) or '').partition(chr(10) * 2)[0].split())}\n" for f in files
    ]
    return "\n" + "".join(lines) if lines else ""


def other_modules() -> list[ModuleType]:
    """Modules of the rooms of passes without a pass of the groups: the splits in running order, then the rest, and the
    algorithms of attention, which are a part of their own."""
    with_pass = {type(p).__module__ for members in GROUPS.values() for p in members}
    names = [m.name for m in pkgutil.walk_packages(passes.__path__, "autopar.passes.") if not m.ispkg]
    left = [n for n in names if n.rpartition(".")[0] in ROOMS and n not in with_pass]
    splits = [n for short in SPLITS for n in left if n.endswith(f".{short}")]
    ordered = [*splits, *(n for n in left if n not in splits), "autopar.passes.attention"]
    return [importlib.import_module(n) for n in ordered]


def main(arguments: list[str]) -> int:
    """Write or check the page; returns the exit status."""
    text = render(GROUPS, other_modules())
    if "--check" in arguments:
        current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
        if current != text:
            print("docs: docs/passes.md is out of date; run make docs")
        return int(current != text)
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
