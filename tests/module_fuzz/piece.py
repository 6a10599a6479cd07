"""What programs are made of: a few lines of Python each."""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """Lines for a module whose forward maps ``x`` of shape [rows, 3] to the same shape.

    ``forward``: statements; ``self`` is the module, ``out`` a dict of further outputs of the model. ``top``: of the
    file. ``init``: of ``__init__``. ``changes``: statements between steps, with ``net`` the model, ``own`` the module
    of this piece, ``mod`` the file, ``log(name, value)`` for what both sides must have alike, ``kept`` a list of
    tensors to be logged after each step. Names that end in _N are this piece's own. ``kind``: a letter, see the
    package.
    """

    name: str
    kind: str
    forward: str
    top: str = ""
    init: str = ""
    changes: tuple[str, ...] = ()


def lines(*texts: str) -> str:
    """Texts that may be indented, one below the other."""
    return "\n".join(text for text in (textwrap.dedent(t).strip("\n ") for t in texts) if text)


def numbered(text: str, number: int) -> str:
    """gain_N --> gain_3"""
    return re.sub(r"(?<=[A-Za-z0-9])_N\b", f"_{number}", lines(text))
