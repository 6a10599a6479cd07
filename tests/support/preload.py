"""What the first compilation of a process loads and finds out: done before ranks are forked, which inherit it."""

from __future__ import annotations

import functools

from autopar import api  # noqa: F401 - and all that it imports
from autopar.compile.model import compile_model
from autopar.ir.mesh import Mesh
from tests.support.plain_models import Net, Tied, build, numbers, tokens


@functools.cache
def warm() -> None:
    """Once per process: half a second here, or on each rank of each pool."""
    for kind, batch in ((Net, numbers()), (Tied, tokens())):
        compile_model(build(kind), batch, Mesh.of(dp=2))
