"""Context-parallel attention. Importing this package fills `autopar.attention.algorithm_table.ALGORITHMS`; the file of
an algorithm is loaded when its name is looked up.

At step t, rank i attends to what has made t hops. `circulate` holds what the ring-like algorithms share.
"""

from __future__ import annotations

from autopar.attention.algorithm_table import ALGORITHMS

# Lists show them in this order.
_FILES = {"all_gather": "all_gather", "token_ring": "token_ring"}  # all others are in ring
for _name in ("all_gather", "ring", "bi_ring", "zigzag_ring", "token_ring", "ulysses", "hybrid"):
    ALGORITHMS.add_later(_name, f"{__name__}.{_FILES.get(_name, 'ring')}")
