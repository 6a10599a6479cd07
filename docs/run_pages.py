"""Execute the pages whose code runs, and put its output into them.

python docs/run_pages.py                  runs the pages and rewrites their output blocks
python docs/run_pages.py --check          runs the pages and fails where a page shows something else
python docs/run_pages.py [--check] guide  those of the guide; or some by their names, such as loops, guide/experts

The ```python blocks of a page run in order in one namespace. A ```text block right behind one shows what it prints; a
block that prints has one. ```python file=train.py is written to a file of that name, and not run: later blocks may
import it. What a page enters into the tables (rules, rewrites, adapters, schedules, attention algorithms, kernels,
policies, dispatchers, chips)
is taken out again when it ends.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import linecache
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# so that a page's import of them adds nothing
import autopar.models.hf
import autopar.passes.attention
import autopar.runtime.schedules  # noqa: F401
from autopar.ac_policies import AC_POLICIES
from autopar.attention.algorithm_table import ALGORITHMS
from autopar.capture.front_end import ADAPTERS
from autopar.chips import CHIPS
from autopar.ops.kernels import KERNELS
from autopar.passes.canonicalize.normalize import REWRITES
from autopar.registry import Registry
from autopar.rules import RULES
from autopar.schedule.request import SCHEDULES
from autopar.token_dispatchers import TOKEN_DISPATCHERS

DOCS = Path(__file__).resolve().parent
NAMES = (
    "walkthrough", "adding", "pipelines", "context_parallel", "memory", "precision", "few_bits", "saving", "experts",
    "loops", "shapes",
)  # fmt: skip
GUIDE = tuple(sorted(f"guide/{file.stem}" for file in (DOCS / "guide").glob("*.md")))

_FENCED = re.compile(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block: language, the file it is written to ("" for none), text, and where it is in the page."""

    language: str
    file: str
    text: str
    start: int
    end: int


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page in order."""
    return [Block(m[1], m[2] or "", m[3], m.start(), m.end()) for m in _FENCED.finditer(page)]


def run(page: str, name: str = "page") -> str:
    """The page with the output that its code gives now. An error of the code comes out, with the page's lines."""
    blocks = blocks_of(page)
    space: dict[str, object] = {"__name__": f"docs_{name}"}
    out, done = [], 0
    with _own_tables(), _own_folder() as folder:
        for i, block in enumerate(blocks):
            if block.language != "python":
                continue
            if block.file:
                (folder / block.file).write_text(block.text, encoding="utf-8")
                continue
            printed = _execute(block, page, name, space)
            after = blocks[i + 1] if i + 1 < len(blocks) else None
            shown = after is not None and after.language == "text" and not page[block.end : after.start].strip()
            if shown:
                assert after is not None
                out.append(f"{page[done : after.start]}```text\n{printed}```")
                done = after.end
            elif printed:
                out.append(f"{page[done : block.end]}\n\n```text\n{printed}```")
                done = block.end
    return "".join(out) + page[done:]


def _execute(block: Block, page: str, name: str, space: dict[str, object]) -> str:
    """What a block prints, without trailing blanks."""
    line = page.count("\n", 0, block.start) + 1
    file, text = f"{name}.md", "\n" * line + block.text  # errors then name the page's lines, and show them
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    code = compile(text, file, "exec")
    stdout = io.StringIO()
    with contextlib.redirect_stdout(stdout):
        exec(code, space)
    printed = "\n".join(x.rstrip() for x in stdout.getvalue().splitlines()).strip("\n")
    return f"{printed}\n" if printed else ""


@contextlib.contextmanager
def _own_tables() -> Iterator[None]:
    """Entries that a page makes are gone afterwards; random numbers start anew."""
    registries: list[Registry[Any]] = [SCHEDULES, ALGORITHMS, KERNELS, AC_POLICIES, TOKEN_DISPATCHERS, CHIPS]
    known = [set(registry) for registry in registries]
    tables: list[dict[object, object]] = [RULES, REWRITES]
    before = [dict(t) for t in tables]
    adapters = list(ADAPTERS)
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            for table, entries in zip(tables, before):
                table.clear()
                table.update(entries)
            for registry, names in zip(registries, known):
                for name in set(registry) - names:
                    registry.remove(name)
            ADAPTERS[:] = adapters


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """A folder for the files of a page, in which it runs and from which it can import."""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        known = set(sys.modules)
        sys.path.insert(0, name)
        try:
            yield Path(name)
        finally:
            sys.path.remove(name)
            for module in set(sys.modules) - known:
                if str(getattr(sys.modules[module], "__file__", None) or "").startswith(name):
                    del sys.modules[module]


def difference(file: Path) -> str:
    """What a page shows and what its code prints now, as a diff; '' when they are the same."""
    old = file.read_text(encoding="utf-8")
    new = run(old, file.stem)
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), f"{file.name} as it is", "as it runs", lineterm="")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Check or rewrite pages; returns the exit status."""
    status = 0
    asked = [x for x in arguments if x != "--check"]
    for name in GUIDE if asked == ["guide"] else asked or (*NAMES, *GUIDE):
        file = DOCS / f"{name}.md"
        if "--check" in arguments:
            found = difference(file)
            if found:
                print(f"{found}\ndocs: {file.name} shows old output; run python docs/run_pages.py")
                status = 1
        else:
            file.write_text(run(file.read_text(encoding="utf-8"), file.stem), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.path.insert(0, str(DOCS.parent))  # the checkout's autopar, if none is installed
    sys.exit(main(sys.argv[1:]))
