"""The table of ZeRO stages (option ``zero``): what is sharded on dp, and when it travels. Loads no torch.

zero   sharded on dp                                     gathered           summed over ranks
0      nothing                                           -                  once per step
1      parameters and optimizer state                    once per step      once per step
2      also accumulated gradients                        once per step      after each microbatch
3      also parameters between their uses                for each use       after each microbatch
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ZeroStage:
    """A row of the table. shards: parameters and optimizer state are sharded. gathers_once: parameters are gathered
    once per step, else for each use; reduces_once: gradients are summed once per step, else after each microbatch.
    ``reshard_after_forward`` and ``reduce_grads`` change the last two."""

    shards: bool
    gathers_once: bool
    reduces_once: bool


ZERO_STAGES: dict[int, ZeroStage] = {
    0: ZeroStage(shards=False, gathers_once=False, reduces_once=True),
    1: ZeroStage(shards=True, gathers_once=True, reduces_once=True),
    2: ZeroStage(shards=True, gathers_once=True, reduces_once=False),
    3: ZeroStage(shards=True, gathers_once=False, reduces_once=False),
}
