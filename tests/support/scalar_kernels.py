"""Inductor's kernels without vector instructions: whether the compiler has them is its own matter, and to find out
takes as long as compiling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def scalar_kernels() -> Iterator[None]:
    """Context manager: Inductor makes no use of vectors. What the process found of them before or finds in here is
    forgotten, since Inductor's cache files are those of the settings alone: code with vectors would be given to a
    process that compiles it without."""
    from torch._inductor import config  # of which most processes of the tests make no use
    from torch._inductor.cpu_vec_isa import valid_vec_isa_list

    valid_vec_isa_list.cache_clear()
    try:
        with config.patch({"cpp.vec_isa_ok": False, "cpp.simdlen": 0}):
            yield
    finally:
        valid_vec_isa_list.cache_clear()
