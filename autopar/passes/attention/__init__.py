"""Attention over ranks. Importing this package fills `autopar.attention.algorithm_table.ALGORITHMS`; an algorithm's
file is loaded when somebody asks for its name.

What rank i attends to at step t has made t hops. `circulate` holds what the ring-like ones share.
"""

from __future__ import annotations

from autopar.attention.algorithm_table import ALGORITHMS

# In the order in which lists show them.
_FILES = {"all_gather": "all_gather", "token_ring": "token_ring"}  # of the others: ring
for _name in ("all_gather", "ring", "bi_ring", "zigzag_ring", "token_ring", "ulysses", "hybrid"):
    ALGORITHMS.add_later(_name, f"{__name__}.{_FILES.get(_name, 'ring')}")
