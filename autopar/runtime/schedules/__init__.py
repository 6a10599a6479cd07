"""Pipeline schedules. Importing this package fills `autopar.schedule.request.SCHEDULES`; one file each.

Symbols: p ranks, m microbatches, v parts per rank, i the rank; F, B, W the times of one stage; M_B what F keeps for B,
M_W what B leaves for W.
"""

# In the order in which lists show them.
# isort: off
from autopar.runtime.schedules import gpipe
from autopar.runtime.schedules import one_f_one_b
from autopar.runtime.schedules import interleaved
from autopar.runtime.schedules import zb_h1
from autopar.runtime.schedules import zb_h2
from autopar.runtime.schedules import zb_auto
from autopar.runtime.schedules import zb_v
from autopar.runtime.schedules import dual_pipe
from autopar.runtime.schedules import dual_pipe_v
from autopar.runtime.schedules import tera_pipe
from autopar.runtime.schedules import seq1f1b

# isort: on

__all__ = [
    "gpipe",
    "one_f_one_b",
    "interleaved",
    "zb_h1",
    "zb_h2",
    "zb_auto",
    "zb_v",
    "dual_pipe",
    "dual_pipe_v",
    "tera_pipe",
    "seq1f1b",
]
