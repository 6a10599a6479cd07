"""A program as a script that runs by itself: `python script.py` shows what differs."""

from __future__ import annotations

import inspect

from tests.module_fuzz import side
from tests.module_fuzz.program import Program

_MAIN = """
if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.py"
        file.write_text(SOURCE)
        wrong, plain, mesh = compared(file, STATEMENTS, WAY)
    print("plain torch:", repr(plain) if plain else "ran")
    print("on the mesh:", wrong or (f"{type(mesh).__name__}: {mesh}" if mesh else "the same"))
    if mesh and not isinstance(mesh, ValueError):
        raise mesh
"""


def script(program: Program, found: str) -> str:
    """``found``: what is wrong, for its head."""
    told = "\n".join(f"# {line}" for line in found.splitlines())
    text = inspect.getsource(side)
    start = text.index("from __future__")
    source = program.source().replace("\\", "\\\\").replace("'''", r"\'\'\'")
    statements = "".join(f"    {statement!r},\n" for statement in program.statements())
    head = f"{told}\n\n{text[start:]}\n\nWAY = {program.way!r}\nSTATEMENTS = [\n{statements}]\nSOURCE = '''\\\n{source}'''\n"
    return f"{head}{_MAIN}"
