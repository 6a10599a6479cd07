"""Attention over ranks. Importing this package fills `autopar.attention.algorithm_table.ALGORITHMS`; one file each.

What rank i attends to at step t has made t hops. `circulate` holds what the ring-like ones share.
"""

# In the order in which lists show them.
# isort: off
from autopar.passes.attention import all_gather
from autopar.passes.attention import ring
from autopar.passes.attention import bi_ring
from autopar.passes.attention import zigzag_ring
from autopar.passes.attention import token_ring
from autopar.passes.attention import ulysses
from autopar.passes.attention import hybrid

# isort: on

__all__ = ["all_gather", "ring", "bi_ring", "zigzag_ring", "token_ring", "ulysses", "hybrid"]
